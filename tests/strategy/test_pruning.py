"""ModelPruning in stages gives the losses, weights, masks, logs and checkpoints of one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from lightning_gpp import CheckpointError
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


class Heard(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def callback(module: Towers, variant: str) -> ModelPruning:
    kwargs = dict(VARIANTS[variant])
    if given := kwargs.get("parameters_to_prune"):
        kwargs["parameters_to_prune"] = given(module)
    return (Filtered if variant == "own method" else ModelPruning)(**kwargs)


class Saving(pl.Callback):
    """Saves after every epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, machine: Any, module: Any) -> None:
        machine.save_checkpoint(f"{self.path}{machine.current_epoch}")


def fitted(given: Any, devices: int, variant: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    heard, log = Heard(), logging.getLogger("lightning.pytorch.callbacks.pruning")
    log.setLevel(logging.INFO)
    log.addHandler(heard)
    module = Towers("momentum" if variant in ("masks kept", "random") else "adam").double()
    callbacks = [callback(module, variant), Saving(f"{folder}/{devices} {variant} ")]
    machine = trainer(given, devices, max_epochs=4, callbacks=callbacks, **TRAINERS.get(variant, {}))
    machine.fit(module, loader(), loader(10, seed=2))
    machine.save_checkpoint(f"{folder}/{devices} {variant} end")
    log.removeHandler(heard)
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in machine.callback_metrics.items()},
        "state": {name: value for name, value in module.state_dict().items() if not value.is_meta},
        "told": heard.messages,
    }


def on_ranks(rank: int, devices: int, variants: list[str], folder: Path, kwargs: Any) -> list[dict[str, Any]]:
    return [fitted(strategy(**{"stages": STAGES, **kwargs}), devices, variant, folder) for variant in variants]


def compare(variant: str, found: dict[str, Any], expected: dict[str, Any], folder: Path, devices: int = 2) -> None:
    for name in ("losses", "metrics"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12), (variant, name)
    assert found["told"] == expected["told"]
    assert found["state"].keys() == expected["state"].keys()
    same(found["state"], expected["state"])
    for when in (0, 1, 2, 3, "end"):
        here, there = (torch.load(folder / f"{count} {variant} {when}", weights_only=False) for count in (devices, 1))
        assert here["state_dict"].keys() == there["state_dict"].keys()
        same(here["state_dict"], there["state_dict"])
        same(here["optimizer_states"], there["optimizer_states"])


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_as_on_one_process(tmp_path: Path) -> None:
    variants = list(VARIANTS)
    expected = [fitted("auto", 1, variant, tmp_path) for variant in variants]
    for rank, found in enumerate(run(2, on_ranks, 2, variants, tmp_path, {})):
        for variant, here, there in zip(variants, found, expected, strict=True):
            print(variant, rank)
            if rank:
                assert here["losses"] == pytest.approx(there["losses"], rel=1e-12)
            else:
                compare(variant, here, there, tmp_path)


def resumed(given: Any, devices: int, variant: str, path: str) -> Any:
    torch.manual_seed(3)
    module = Towers("adam").double()
    machine = trainer(given, devices, max_epochs=4, callbacks=[callback(module, variant)])
    machine.fit(module, loader(), loader(10, seed=2), ckpt_path=path, weights_only=False)
    losses = module.losses
    machine.validate(module, loader(10, seed=2))
    return losses, dict(machine.callback_metrics)


def resumed_on_ranks(rank: int, folder: Path) -> Any:
    with pytest.raises(CheckpointError, match="weight_orig"):
        resumed(strategy(), 2, "tickets", f"{folder}/1 masks kept 2")
    return resumed(strategy(), 2, "tickets", f"{folder}/1 tickets 1")


def after(rank: int, folder: Path) -> Any:
    torch.manual_seed(0)
    module = Towers("adam").double()
    machine = trainer(strategy(), 2, max_epochs=2, callbacks=[callback(module, "masks kept")])
    machine.fit(module, loader(), loader(10, seed=2))
    machine.validate(module, loader(10, seed=2))
    return dict(machine.callback_metrics)


def test_resume(tmp_path):
    fitted("auto", 1, "tickets", tmp_path)
    fitted("auto", 1, "masks kept", tmp_path)
    print(resumed("auto", 1, "tickets", f"{tmp_path}/1 tickets 1"))
    print(run(2, resumed_on_ranks, tmp_path))


def test_after(tmp_path):
    print(run(2, after, tmp_path))
    assert 0
