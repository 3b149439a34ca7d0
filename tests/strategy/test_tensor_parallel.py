"""Tensor parallelism inside stages gives the numbers of one process, and goes together with the rest."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_gpp import ConfigError, capture_step
from lightning_gpp._compat.lightning_module import set_device_mesh
from lightning_gpp._compat.torch import imitated_processes
from lightning_gpp.training.divided.parallel_regions import captured_apart
from lightning_gpp.training.divided.tensor_parallel import (
    TensorParallel,
    dividing,
)
from tests.strategy.harness import run, strategy, trainer
from tests.strategy.parallel_models import Branches, Tower, loader, make

CHAIN = [{"modules": ["layers.0"], "devices": [1]}, {"modules": ["layers.1", "head", "@step"], "devices": [0]}]
REPLICATED = [
    {"modules": ["layers.0"], "devices": [0, 1]},
    {"modules": ["layers.1", "head", "@step"], "devices": [0]},
]
TOGETHER = {"layers": 0, "head": 0}
CLIPPED = {"gradient_clip_val": 0.5}

Result = dict[str, Any]


def outcome(module: Tower, used: Any, rank: int) -> Result:
    weights = {name: value.tolist() for name, value in module.state_dict().items()} if rank == 0 else {}
    metrics = {name: float(value) for name, value in used.callback_metrics.items()}
    return {"losses": module.losses, "metrics": metrics, "weights": weights}


def fit(rank: int, world: int, kind: type[Tower], options: dict[str, Any], settings: dict[str, Any]) -> Result:
    module = make(kind)
    used = trainer(strategy(tensor_parallel_size=2, num_micro_batches=2, **options), devices=world, **settings)
    warnings.filterwarnings("error", message=".*captured anew")
    used.fit(module, loader(), loader())
    return outcome(module, used, rank)


def alone(kind: type[Tower] = Tower, **settings: Any) -> Result:
    module, used = make(kind, divides=False), trainer(**settings)
    used.fit(module, loader(), loader())
    return outcome(module, used, 0)


def assert_same(found: list[Result], expected: Result) -> None:
    for each in found:
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert each["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    assert found[0]["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        weights = (torch.tensor(values, dtype=torch.float64) for values in (found[0]["weights"][name], value))
        torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


CASES = {
    "chain, zero-bubble": (Tower, {"stages": CHAIN, "schedule": "zb_h1"}),
    "a replicated stage, zero1": (Tower, {"stages": REPLICATED, "sharding": "zero1"}),
    "the planner's stages": (Branches, {}),
}


def fit_all(rank: int) -> list[Result]:
    return [fit(rank, 4, kind, {"stages": None, **options}, CLIPPED) for kind, options in CASES.values()]


def test_losses_and_weights_are_those_of_one_process() -> None:
    for (kind, _), *found in zip(CASES.values(), *run(4, fit_all), strict=True):
        assert_same(found, alone(kind, **CLIPPED))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def fit_once(rank: int, world: int, degree: int, folder: str, path: str | None, **options: Any) -> list[float]:
    """Train an epoch, from a checkpoint if there is one, and save."""
    module = make()
    options = {"stages": CHAIN if world > degree else TOGETHER, "num_micro_batches": 2, **options}
    used = trainer(strategy(tensor_parallel_size=degree, **options), devices=world, max_epochs=2 if path else 1)
    used.fit(module, loader(), ckpt_path=path)
    used.save_checkpoint(f"{folder}/{world}.ckpt")
    return module.losses


OWNED = {"stages": REPLICATED, "sharding": "zero1"}
"""Replicas, each of which has the optimizer's state of some parameters."""


@pytest.mark.acceptance
@pytest.mark.parametrize("saving", [{"state_dict_type": "full"}, {"async_save": True}])
def test_resumes_with_owners(saving: dict[str, Any], tmp_path: Path) -> None:
    owned = partial(fit_once, **saving, **OWNED)
    first = run(4, owned, 4, 2, str(tmp_path), None)[0]
    second = run(4, owned, 4, 2, str(tmp_path), f"{tmp_path}/4.ckpt")[0]
    assert [*first, *second] == pytest.approx(alone()["losses"], rel=1e-12)


def test_ordinary_file_has_undivided_tensors(tmp_path: Path) -> None:
    run(2, fit_once, 2, 2, str(tmp_path), None)
    found = torch.load(tmp_path / "2.ckpt", weights_only=False)
    expected = make()
    assert {name: value.shape for name, value in found["state_dict"].items()} == {
        name: value.shape for name, value in expected.state_dict().items()
    }
    momenta = [state["momentum_buffer"].shape for state in found["optimizer_states"][0]["state"].values()]
    assert momenta == [parameter.shape for parameter in expected.parameters()]


# -- random numbers ---------------------------------------------------------------------------------------------------


def drop(rank: int, world: int, degree: int) -> list[float]:
    module = make(dropout=0.3)
    options = {"stages": CHAIN, "tensor_parallel_size": degree, "num_micro_batches": 2, "seed": 3}
    trainer(strategy(**options), devices=world, max_epochs=1).fit(module, loader())
    return module.losses


@pytest.mark.acceptance
def test_dropout_is_that_of_one_process_per_device() -> None:
    (expected, *_), found = run(2, drop, 2, 1), run(4, drop, 4, 2)
    assert all(losses == pytest.approx(expected, rel=1e-12) for losses in found)


# -- checks and refusals ----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """An undivided parameter works on divided values, so its gradient is a part on every member."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Wrong(Tower):
    """Lacks a sum over members."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers[0].up = nn.Sequential(nn.Linear(8, 12), Scaled())

    def parallel_plan(self) -> dict[str, Any]:
        plan = super().parallel_plan()
        plan["layers.0.up.0"] = plan.pop("layers.0.up")
        return plan


def wrong(rank: int) -> None:
    used = trainer(strategy(stages=TOGETHER, tensor_parallel_size=2), devices=2, max_epochs=1)
    used.fit(make(Wrong), loader())


def test_self_check_finds_a_gradient_that_lacks_a_sum_over_members() -> None:
    with pytest.raises(AssertionError, match=r"SelfCheckError: .* the gradients of 1 parameters differ.*up.1.scale"):
        run(2, wrong)


class Open(Tower):
    """Returns divided values to the step."""

    def parallel_plan(self) -> dict[str, Any]:
        return {**super().parallel_plan(), "head": ColwiseParallel()}


class Tied(Tower):
    """Has one parameter in two layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers[1].up.weight = self.layers[0].up.weight


class Uneven(Tower):
    """Has a size between two layers that the processes cannot share evenly."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers[0].up, self.layers[0].down = nn.Linear(8, 11), nn.Linear(11, 8)


def divided(kind: type[Tower], num_devices: int = 2) -> TensorParallel | None:
    """The division of a module on four processes, which are imitated, and its regions."""
    module = make(kind)
    with imitated_processes(4):
        names = ("data_parallel", "tensor_parallel")
        set_device_mesh(module, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        with dividing(module, [0, 1]) as found:
            module.configure_model()
        record = partial(capture_step, module, next(iter(loader())))
        captured_apart(
            lambda uncut: record(uncut=uncut), found[0], module, nullcontext, num_devices, lambda find: find()
        )
    return found[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Open, "divides the result of 'head|divides the result of .* which goes to the step"),
        (Tied, "makes two parameters of 'layers.0.up.weight' and 'layers.1.up.weight', which were one"),
        (Uneven, r"(?s)cannot run: RuntimeError: .*multiples of strategy.tensor_parallel_size"),
    ],
)
def test_divisions_that_do_not_work(kind: type[Tower], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        divided(kind)


def test_modules_around_divided_values_are_called_whole() -> None:
    found = divided(Branches)
    assert found is not None
    assert found.regions.keys() == {"layers.0", "layers.1", "layers.2"}
    assert found.cut.keys() >= {"head.weight", "layers.0.up.weight", "layers.0.up.bias", "layers.0.down.weight"}
    assert not found.cut.keys() & {"layers.0.down.bias", "layers.0.norm.weight"}


def fit_alone(rank: int) -> None:
    trainer(strategy(tensor_parallel_size=2)).fit(make(), loader(), loader())


def test_number_of_processes_must_be_a_multiple() -> None:
    with pytest.raises(AssertionError, match="ConfigError: .*tensor_parallel_size=2 does not divide the 1 processes"):
        run(1, fit_alone)
