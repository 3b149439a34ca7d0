"""A loss or gradient that is not finite: all ranks stop, or leave out the same optimizer step."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.training import setup
from lightning_gpp.training.tensors import replicas
from tests.strategy import harness
from tests.strategy.harness import TwoTowers

BAD = 1
"""The mini-batch with a number that is not finite."""


class Poisoned(TwoTowers):
    """One place has an infinite number in one mini-batch."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.weights = place, []
        if place == "left":
            self.left[0].weight.register_hook(self.poison)

    def poison(self, value: torch.Tensor) -> torch.Tensor:
        bad = self._trainer is not None and self.trainer.training and self.trainer.fit_loop.total_batch_idx == BAD
        return value * torch.inf if bad else value

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().loss(batch)
        return (self.poison(loss) if self.place == "loss" else loss), logits

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append([p.detach().clone() for p in self.parameters() if not p.is_meta])


def fit(place: str, reaction: str | None, **options: Any) -> Poisoned:
    for checked in (setup, replicas):  # the fault is made by a hook on a gradient
        checked.check_no_hooks = lambda *_: None  # type: ignore[attr-defined]
    module = Poisoned(place).double()
    strategy = harness.strategy(on_nonfinite=reaction, self_check=False, **options)
    trainer = harness.trainer(strategy, devices=2, max_epochs=1, gradient_clip_val=1.0)
    trainer.fit(module, harness.loader(24))
    return module


def stopped(rank: int, place: str, step: str) -> str:
    FailureMonitor.report = lambda self, error: None  # type: ignore[method-assign]  # each finds it by itself
    with pytest.raises(GPPError) as caught:
        fit(place, "stop", step=step)
    return str(caught.value)


@pytest.mark.parametrize(
    ("place", "what", "step"),
    [
        ("left", r"The gradient of 'left.0.weight' in stage '.+'", "auto"),
        ("loss", "The loss", "whole"),
    ],
)
def test_all_ranks_stop_with_the_place(place: str, what: str, step: str) -> None:
    for message in harness.run(2, stopped, place, step):
        assert re.match(rf"{what} is not finite after mini-batch {BAD}\. Lower the learning rate", message)


def skipped(rank: int, place: str, options: dict[str, Any]) -> tuple[list[bool], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(place, "skip", **options)
    pairs = zip(module.weights, module.weights[1:], strict=False)
    same = [all(map(torch.equal, before, after)) for before, after in pairs]
    return same, [str(each.message) for each in caught if "on_nonfinite" in str(each.message)]


@pytest.mark.parametrize(
    ("place", "options", "unchanged"),
    [
        ("left", {}, [True, False]),
        ("loss", {"stages": None, "num_pipelines": 2, "sharding": "zero1"}, [True]),
    ],
)
def test_all_ranks_leave_out_the_step(place: str, options: dict[str, Any], unchanged: list[bool]) -> None:
    for rank, (same, told) in enumerate(harness.run(2, skipped, place, options)):
        assert same == unchanged
        assert len(told) == (rank == 0)


def test_asynchronous_training_cannot_skip() -> None:
    with pytest.raises(ConfigError, match=r"strategy.on_nonfinite='skip' does not go together.*weights=stash"):
        harness.strategy(weights="stash", on_nonfinite="skip")
