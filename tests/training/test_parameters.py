"""Where parameters live: placed, shared, initialised from the meta device; and ranks that do not agree."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gpp_examples.plain_loop import Batch, Branches, loss_of
from lightning_gpp import CheckpointError, ConfigError
from lightning_gpp._compat.lightning_module import set_device
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.runtime.named_tensors import tensors_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.planner import check_step_device
from lightning_gpp.training.states import load_state, whole_state
from lightning_gpp.training.tensors.foreign import Whereabouts
from lightning_gpp.training.tensors.parameters import Layout, drop, move, settle
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from tests.distributed import run_distributed


class Towers(Branches):
    """The branches of the example, with a step of their own."""

    def training_step(self, batch: Batch) -> Tensor:
        return loss_of(self, batch)


def make_module(seed: int = 0) -> Towers:
    torch.manual_seed(seed)
    return Towers().double()


def optimizer_of(module: nn.Module) -> AdamW:
    """Weights decay, biases do not."""
    decay = [p for n, p in module.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in module.named_parameters() if not n.endswith("weight")]
    return AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


CPU = torch.device("cpu")


PLAN = Plan(
    stages=(Stage(name="all", modules=("left", STEP), devices=(0,), micro_batch_size=1),), edges=(), batch_size=2
)


def elsewhere(module: nn.Module, here: set[str]) -> dict[str, Whereabouts]:
    return {name: Whereabouts(name, "other", frozenset({1})) for name in tensors_of(module) if name not in here}


def control_of(rank: int, num_devices: int, num_pipelines: int = 1) -> Control:
    return Control(Mesh(num_devices, num_pipelines, rank))


def settle_and_merge(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # the ranks start with different values
    module = make_module(seed=rank)
    own = {name: tensor.clone() for name, tensor in tensors_of(module).items()}
    devices = {name: (1,) if name.startswith("left") else (0, 1) if "head" in name else (0,) for name in own}
    control, layout = control_of(rank, 2), Layout(plan=PLAN, devices=devices)
    whole = settle(module, layout, control, CPU)
    held = {name: tensor.tolist() for name, tensor in tensors_of(module).items() if not tensor.is_meta}
    state = whole_state(module, layout, control)
    complete = {name: value.tolist() for name, value in state.items() if not value.is_meta}
    return {"own": {n: t.tolist() for n, t in own.items()}, "held": held, "state": complete, "whole": whole}


def test_shared_tensors_become_equal_and_states_are_merged() -> None:
    first, second = run_distributed(2, settle_and_merge)
    assert first["whole"]
    assert second["whole"]
    assert first["held"]["head.weight"] == second["held"]["head.weight"] == first["own"]["head.weight"]
    assert second["held"]["left.0.weight"] == second["own"]["left.0.weight"]
    assert "left.0.weight" not in first["held"]
    assert first["state"].keys() == first["own"].keys()
    assert first["state"]["left.0.weight"] == second["own"]["left.0.weight"]


def test_a_step_on_several_devices() -> None:
    stage = Stage(name="all", modules=("left", STEP), devices=(0, 1), micro_batch_size=1)
    with pytest.raises(ConfigError, match=r"Stage 'all' runs the user's step .* on devices \(0, 1\)"):
        check_step_device(Plan(stages=(stage,), edges=(), batch_size=2))


def test_dropping_keeps_names_ties_and_flags() -> None:
    module = make_module()
    module.head.weight.requires_grad_(False)
    module.tied = module.head  # the same module twice
    names = list(module.state_dict())
    drop(module, elsewhere(module, {"left.0.weight"}), CPU)
    assert list(module.state_dict()) == names
    assert module.tied.weight is module.head.weight
    assert not module.head.weight.requires_grad
    assert [n for n, p in module.named_parameters() if not p.is_meta] == ["left.0.weight"]


def test_loading_fills_what_was_dropped() -> None:
    module, other = make_module(), make_module(seed=1)
    drop(module, elsewhere(module, {"left.0.weight"}), CPU)
    load_state(module, other.state_dict(), strict=True)
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def test_states_of_an_optimizer_by_name() -> None:
    module = make_module()
    optimizer = optimizer_of(module)
    index = OptimizerIndex(optimizer, module)
    sum(p.sum() for p in module.parameters()).backward()
    optimizer.step()
    full = optimizer.state_dict()
    names = {name for name, _ in module.named_parameters() if name.startswith("left")}
    index.keep(names, tensors_of(module))
    assert set(index.state()) == names == index.kept
    index.load(full)
    assert set(index.state()) == names
    merged = index.merged(index.state())
    assert merged["param_groups"] == full["param_groups"]
    full["state"][99] = {}
    with pytest.raises(CheckpointError, match=r"entries \[99\] for only 10 parameters"):
        index.load(full)
    with pytest.raises(CheckpointError, match=r"is not one of AdamW: KeyError: 'step'"):
        index.load({**full, "state": {0: {"momentum_buffer": torch.zeros(())}}})


class Recurrent(nn.LSTM):
    """Counts how often its parameters are put into one block of memory."""

    flattened = 0

    def flatten_parameters(self) -> None:
        self.flattened += 1
        super().flatten_parameters()


class Lightning(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.elsewhere = Recurrent(2, 2), Recurrent(2, 2, device="meta")


def test_moving_tells_lightning_and_recurrent_networks() -> None:
    """`module.to(device)` does both, but moves what other ranks hold, too."""
    module = Lightning()
    before = module.here.flattened, module.elsewhere.flattened
    set_device(module, torch.device("meta"))
    assert module.device.type == "meta"
    move(module, CPU)
    assert module.device == CPU
    assert (module.here.flattened, module.elsewhere.flattened) == (before[0] + 1, before[1])
