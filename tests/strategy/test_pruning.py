"""ModelPruning in stages gives the losses, weights, masks, logs and checkpoints of one process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.prune import BasePruningMethod

from lightning_gpp import CheckpointError, ConfigError
from lightning_gpp.strategy.checkpoints import Checkpoints
from lightning_gpp.strategy.pruning import check_pruning
from lightning_gpp.training.options import Options
from tests.strategy.harness import STAGES, loader, run, strategy, trainer
from tests.strategy.test_callbacks import Plain


class Towers(Plain):
    """Two towers with an optimizer of choice."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        if self.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.2)


class Small(BasePruningMethod):
    """Prunes the values below a limit."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: float) -> None:
        self.limit = amount

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask * (t.abs() > self.limit)


class Filtered(ModelPruning):
    """Prunes no biases."""

    def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
        return [(part, name) for part, name in parameters_to_prune if name == "weight"]


class Watching(pl.Callback):
    """Counts the zeros of a weight of the first rank, and saves, after every epoch."""

    def __init__(self, path: str) -> None:
        self.path, self.zeros = path, list[int]()

    def on_train_epoch_end(self, machine: Any, module: Any) -> None:
        machine.save_checkpoint(f"{self.path} {machine.current_epoch}")
        if machine.is_global_zero:
            self.zeros += [int((module.head.weight == 0).sum())]


class Heard(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def weights(module: Towers) -> list[tuple[nn.Module, str]]:
    return [(module.left[0], "weight"), (module.right[0], "weight"), (module.left[2], "weight")]


VARIANTS: dict[str, dict[str, Any]] = {
    "tickets": {"pruning_fn": "l1_unstructured", "amount": 0.3, "verbose": 2},
    "masks kept": {
        "pruning_fn": "l1_unstructured",
        "amount": lambda epoch: 0.1 * (epoch + 1),
        "apply_pruning": lambda epoch: epoch != 1,
        "use_lottery_ticket_hypothesis": lambda epoch: epoch == 2,
        "make_pruning_permanent": False,
        "verbose": 1,
    },
    "structured": {
        "pruning_fn": "ln_structured",
        "pruning_dim": 0,
        "pruning_norm": 2,
        "amount": 1,
        "use_global_unstructured": False,
        "parameters_to_prune": weights,
        "resample_parameters": True,
    },
    "random": {
        "pruning_fn": "random_unstructured",
        "amount": 7,
        "use_lottery_ticket_hypothesis": False,
        "parameters_to_prune": weights,
    },
    "random channels": {
        "pruning_fn": "random_structured",
        "pruning_dim": 1,
        "amount": 0.2,
        "use_global_unstructured": False,
        "parameter_names": ["weight"],
        "use_lottery_ticket_hypothesis": False,
        "prune_on_train_epoch_end": False,
    },
    "own method": {
        "pruning_fn": Small,
        "amount": lambda epoch: 0.1 + 0.05 * epoch,
        "use_lottery_ticket_hypothesis": False,
        "make_pruning_permanent": False,
    },
}
TRAINERS: dict[str, dict[str, Any]] = {
    "masks kept": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "own method": {"limit_val_batches": 0},
    "random": {"limit_val_batches": 0},
}
FEW, OTHERS = ["tickets", "masks kept", "random"], ["structured", "random channels", "own method"]


def pruning(module: Towers, variant: str) -> ModelPruning:
    kwargs = dict(VARIANTS[variant])
    if "parameters_to_prune" in kwargs:
        kwargs["parameters_to_prune"] = weights(module)
    return (Filtered if variant == "own method" else ModelPruning)(**kwargs)


def fitted(given: Any, devices: int, variant: str, folder: Path, **kwargs: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    heard, log = Heard(), logging.getLogger("lightning.pytorch.callbacks.pruning")
    log.setLevel(logging.INFO)
    log.addHandler(heard)
    module = Towers("momentum" if variant in ("masks kept", "random") else "adam").double()
    watching, path = Watching(f"{folder}/{devices} {variant}"), kwargs.pop("ckpt_path", None)
    options = {"max_epochs": 4, "use_distributed_sampler": False, **TRAINERS.get(variant, {}), **kwargs}
    machine = trainer(given, devices, callbacks=[pruning(module, variant), watching], **options)
    machine.fit(module, loader(16), loader(10, seed=2), ckpt_path=path, weights_only=False)
    machine.save_checkpoint(f"{folder}/{devices} {variant} end")
    log.removeHandler(heard)
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in machine.callback_metrics.items()},
        "state": {name: value for name, value in module.state_dict().items() if not value.is_meta},
        "zeros": watching.zeros,
        "told": heard.messages,
    }


def on_ranks(rank: int, devices: int, variants: Sequence[str], folder: Path, kwargs: Any) -> list[dict[str, Any]]:
    return [fitted(strategy(**{"stages": STAGES, **kwargs}), devices, each, folder) for each in variants]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def compare(variant: str, found: dict[str, Any], expected: dict[str, Any], folder: Path, devices: int) -> None:
    for name in ("losses", "metrics", "zeros"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12), (variant, name)
    assert found["told"] == expected["told"]
    same(found["state"], expected["state"])
    for when in (0, 1, 2, 3, "end"):
        here, there = (torch.load(folder / f"{count} {variant} {when}", weights_only=False) for count in (devices, 1))
        assert here["state_dict"].keys() == there["state_dict"].keys()
        same(here["state_dict"], there["state_dict"])
        same(here["optimizer_states"], there["optimizer_states"])


def check(variants: Sequence[str], folder: Path, devices: int, **kwargs: Any) -> None:
    expected = [fitted("auto", 1, variant, folder) for variant in variants]
    ranks = run(devices, on_ranks, devices, variants, folder, kwargs)
    for variant, found, there in zip(variants, ranks[0], expected, strict=True):
        compare(variant, found, there, folder, devices)
    for found in ranks[1:]:
        for here, there in zip(found, ranks[0], strict=True):
            assert here["told"] == []
            assert here["losses"] == pytest.approx(there["losses"], rel=1e-12)


def test_as_on_one_process(tmp_path: Path) -> None:
    check(FEW, tmp_path, 2)


@pytest.mark.acceptance
def test_other_options(tmp_path: Path) -> None:
    check(OTHERS, tmp_path, 2)


ALIKE = {"num_pipelines": 2, "num_micro_batches": 2}
"""Two pipelines that train with the same mini-batches: their mean is that of one process."""


@pytest.mark.acceptance
@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_replicas(sharding: str, tmp_path: Path) -> None:
    check([*FEW, "structured"], tmp_path, 4, sharding=sharding, **ALIKE)


@pytest.mark.acceptance
def test_pipelines_of_one_device(tmp_path: Path) -> None:
    check([*FEW, "structured"], tmp_path, 2, stages=None, **ALIKE)


@pytest.mark.acceptance
@pytest.mark.parametrize("variant", ["tickets", "own method"])
def test_on_one_process(variant: str, tmp_path: Path) -> None:
    """torch's own hooks mask there, and checkpoints have the state of pruned parameters, too."""
    for name in ("plain", "stages"):
        (tmp_path / name).mkdir()
    expected = fitted("auto", 1, variant, tmp_path / "plain")
    ((found,),) = run(1, on_ranks, 1, [variant], tmp_path / "stages", {"stages": None})
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    for when in (2, "end"):
        here, there = (
            torch.load(tmp_path / name / f"1 {variant} {when}", weights_only=False) for name in ("stages", "plain")
        )
        same(here["state_dict"], there["state_dict"])
        same(here["optimizer_states"], there["optimizer_states"])


@pytest.mark.acceptance
def test_split_backwards(tmp_path: Path) -> None:
    check(FEW, tmp_path, 2, schedule="zb_h1")


# -- later runs -------------------------------------------------------------------------------------------------------


def several(given: Any, devices: int, variants: Sequence[str]) -> Any:
    """Runs of one module, then a validation."""
    torch.manual_seed(0)
    module = Towers("adam").double()
    for variant in variants:
        made = given() if callable(given) else given
        machine = trainer(made, devices, callbacks=[pruning(module, variant)])
        machine.fit(module, loader(16), loader(10, seed=2))
    machine.validate(module, loader(10, seed=2), verbose=False)
    return module.losses, {name: float(value) for name, value in machine.callback_metrics.items()}


def resumed_and_several(rank: int, folder: Path) -> list[Any]:
    found = fitted(strategy(), 2, "tickets", folder, ckpt_path=f"{folder}/1 tickets 1")
    with pytest.raises(CheckpointError, match="weight_orig"):
        fitted(strategy(), 2, "masks kept", folder, ckpt_path=f"{folder}/1 masks kept 1")
    return [found["losses"], several(strategy, 2, ["structured"] * 2), several(strategy, 2, ["own method"])]


@pytest.mark.acceptance
def test_later_runs(tmp_path: Path) -> None:
    for variant in ("tickets", "masks kept"):
        fitted("auto", 1, variant, tmp_path, max_epochs=2)
    resumed = fitted("auto", 1, "tickets", tmp_path, ckpt_path=f"{tmp_path}/1 tickets 1")
    expected = [resumed["losses"], several("auto", 1, ["structured"] * 2), several("auto", 1, ["own method"])]
    with pytest.raises(RuntimeError, match="weight_orig"):
        fitted("auto", 1, "masks kept", tmp_path, ckpt_path=f"{tmp_path}/1 masks kept 1")
    fitted("auto", 1, "tickets", tmp_path, max_epochs=2)
    for losses, *others in run(2, resumed_and_several, tmp_path):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        for (here, metrics), (there, values) in zip(others, expected[1:], strict=True):
            assert here == pytest.approx(there, rel=1e-12)
            assert metrics == pytest.approx(values, rel=1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sharding", "whole", "words"),
    [
        ({"weights": "stash"}, "none", False, "strategy.weights=stash keeps several. Leave it out"),
        ({}, "fsdp", False, "Use zero1"),
        ({"tensor_parallel_size": 2}, "none", False, "tensor_parallel_size=2 divides them. Leave it out"),
        ({}, "none", True, "Use automatic optimization"),
    ],
)
def test_refused(options: Any, sharding: str, whole: bool, words: str) -> None:
    module = Towers("adam")
    callback = pruning(module, "tickets")
    callback.setup(trainer(), module, "fit")
    job: Any = SimpleNamespace(options=Options(**options), whole=whole, module=module)
    plan: Any = SimpleNamespace(sharding=sharding)
    with pytest.raises(ConfigError, match=words):
        check_pruning([callback], job, plan)


def test_tied_parameters_are_refused() -> None:
    module = Towers("adam")
    module.left[2].bias = module.left[0].bias
    callback = pruning(module, "tickets")
    callback.setup(trainer(), module, "fit")
    job: Any = SimpleNamespace(options=Options(), whole=False, module=module)
    with pytest.raises(ConfigError, match=r"another module has the same parameter.*filter_parameters_to_prune"):
        check_pruning([callback], job, SimpleNamespace(sharding="none"))  # type: ignore[arg-type]


def test_a_module_that_is_pruned_already_is_refused() -> None:
    module = Towers("adam")
    callback = pruning(module, "tickets")
    callback.setup(trainer(), module, "fit")
    prune.l1_unstructured(module.left[0], "weight", amount=1)
    job: Any = SimpleNamespace(options=Options(), whole=False, module=module)
    with pytest.raises(ConfigError, match=r"'left.0.weight' is pruned already.*prune.remove"):
        check_pruning([callback], job, SimpleNamespace(sharding="none"))  # type: ignore[arg-type]


def test_folders_are_refused() -> None:
    checkpoints = Checkpoints(Options(state_dict_type="sharded"), io=lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ModelPruning, whose masked weights"):
        checkpoints.begin([pruning(Towers("adam"), "tickets")])
