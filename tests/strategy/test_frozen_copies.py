"""Frozen copies of modules are where their originals are: averages of weights by hand work as on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.training.frozen_copies import originals
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader


class Averaging(TwoTowers):
    """Validates with an average of the weights, which a hook updates; trains one tower later than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.right[:2]
        self.average = copy.deepcopy(nn.ModuleDict({"left": self.left, "head": self.head})).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        a, b, y = batch
        logits = self.average["head"](torch.cat([self.average["left"](a), self.right(b)], dim=1))
        self.log("val_loss", F.cross_entropy(logits, y))

    def on_train_epoch_start(self) -> None:
        self.left.requires_grad_(self.current_epoch > 0)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, average in self.average.items():
            for mean, weight in zip(average.parameters(), self.get_submodule(name).parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def on_validation_epoch_end(self) -> None:
        """Keep nothing."""


def fitted(strategy: Any, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Averaging().double()
    clipped = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    trainer = harness.trainer(strategy, devices, **clipped)
    trainer.fit(module, loader(), loader(10, seed=2))
    (again,) = trainer.validate(module, loader(12, seed=3), verbose=False)
    state = {name: value.tolist() for name, value in module.state_dict().items()} if trainer.is_global_zero else {}
    return {"epochs": module.metrics, "again": again, "state": state}


def divided(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    return fitted(harness.strategy(**settings), 2)


@pytest.mark.parametrize("step", ["auto", "whole"])
def test_averages_by_hand(step: str) -> None:
    found, other = harness.run(2, divided, {"step": step})
    expected = fitted("auto", 1)
    for each in (found, other):
        assert each["again"] == pytest.approx(expected["again"], rel=1e-12)
        for epoch, right in zip(each["epochs"], expected["epochs"], strict=True):
            assert epoch == pytest.approx(right, rel=1e-12)
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(found["state"][name]), torch.tensor(value), rtol=1e-11, atol=1e-13)


def used_by(module: nn.Module, *paths: str) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith(paths)}


def test_copies_are_found_by_class_names_and_shapes() -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.fast = copy.deepcopy(module.net).requires_grad_(False)
    module.slow = copy.deepcopy(module.net).requires_grad_(False)
    module.other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    module.trained = copy.deepcopy(module.net)
    found = originals(module, used_by(module, "net."))
    names = [*dict(module.net.named_parameters()), *dict(module.net.named_buffers())]
    assert found == {f"{kind}.{name}": f"net.{name}" for kind in ("fast", "slow") for name in names}


def test_copies_that_could_be_of_several_modules_are_left() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    module.copies = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)).requires_grad_(False)
    assert originals(module, used_by(module, "blocks.")) == {}
    module.copies.append(nn.Linear(2, 2).requires_grad_(False))
    assert originals(module, used_by(module, "blocks.1"))["copies.1.weight"] == "blocks.1.weight"
