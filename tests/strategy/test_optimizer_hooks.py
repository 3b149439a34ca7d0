"""Hooks around gradients see the groups of optimizers with the parameters of all ranks, as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_gpp import summon_full_params
from lightning_gpp._compat.torch import pytree
from tests.strategy.harness import TwoTowers, loader, run, strategy, trainer


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ByHand(TwoTowers):
    """Clips by hand, over the groups of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [p.grad.norm().item() ** 2 for p in parameters_of(optimizer) if p.grad is not None]
        self.norms.append(sum(squares) ** 0.5)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, 0.2 / self.norms[-1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Watching(Callback):
    """Saves in the middle of a hook around gradients."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_after_backward(self, machine: Any, module: Any) -> None:
        if machine.global_step == 2:
            machine.save_checkpoint(f"{self.folder}/saved.ckpt")


def facts_of(given: Any, devices: int, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    module, watching = ByHand().double(), Watching(str(folder))
    trainer(given, devices, callbacks=[watching]).fit(module, loader(), loader(10, seed=2))
    return {"losses": module.losses, "norms": module.norms}


def on_ranks(rank: int, folder: Path, devices: int, options: dict[str, Any]) -> dict[str, Any]:
    return facts_of(strategy(**options), devices, folder)


REPLICAS = [{"modules": ["left"], "devices": [1, 2]}, {"modules": ["right", "head", "@step"], "devices": [0]}]


@pytest.mark.parametrize(
    ("devices", "options"),
    [(2, {}), (2, {"step": "whole"}), (3, {"stages": REPLICAS, "sharding": "zero1", "self_check": False})],
    ids=["stages", "whole", "zero1"],
)
def test_as_on_one_process(tmp_path: Path, devices: int, options: dict[str, Any]) -> None:
    expected = facts_of("auto", 1, tmp_path / "one")
    for found in run(devices, on_ranks, tmp_path / "more", devices, options):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-11), name
    one, more = (torch.load(tmp_path / name / "saved.ckpt", weights_only=False) for name in ("one", "more"))
    for here, there in zip(*(pytree.tree_leaves(each["optimizer_states"]) for each in (more, one)), strict=True):
        if isinstance(there, torch.Tensor):
            torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-14)
        else:
            assert here == there


class Notes(Callback):
    """Changes a checkpoint by the values that it has, and by those of the module."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_save_checkpoint(self, machine: Any, module: Any, checkpoint: Any) -> None:
        with summon_full_params(module):
            checkpoint["norms"] = {name: value.norm().item() for name, value in module.named_parameters()}
        checkpoint["means"] = {name: value.abs().mean().item() for name, value in checkpoint["state_dict"].items()}

    def on_train_epoch_end(self, machine: Any, module: Any) -> None:
        machine.save_checkpoint(f"{self.folder}/{machine.world_size}.ckpt")


def saves(given: Any, devices: int, folder: str) -> None:
    torch.manual_seed(0)
    module, machine = TwoTowers().double(), trainer(given, devices, callbacks=[Notes(folder)], max_epochs=1)
    machine.fit(module, loader(), loader())
    attributes = set(vars(module))
    machine.save_checkpoint(f"{folder}/{devices}later.ckpt")
    assert set(vars(module)) == attributes


def saves_on_ranks(rank: int, folder: str) -> None:
    saves(strategy(), 2, folder)


def test_a_hook_reads_the_values_of_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    saves("auto", 1, str(tmp_path))
    run(2, saves_on_ranks, str(tmp_path))
    for name in ("", "later"):
        one, two = (torch.load(tmp_path / f"{devices}{name}.ckpt", weights_only=False) for devices in (1, 2))
        for entry in ("means", "norms"):
            assert two[entry] == pytest.approx(one[entry], rel=1e-11), (name, entry)
