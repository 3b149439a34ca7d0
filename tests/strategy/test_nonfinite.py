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


class Skipping(TwoTowers):
    """Returns None for what is not finite, in the mini-batch `BAD`, or for micro-batches without the first class."""

    def __init__(self, reason: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.reason, self.weights = reason, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        bad = not loss.isfinite()
        skips = {"not finite": bad, "first": bad, "number": batch_idx == BAD, "class": not (batch[2] == 0).any()}
        return None if skips[self.reason] else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self.named_parameters() if not p.is_meta})


def samples(reason: str) -> list[list[torch.Tensor]]:
    """Mini-batches of eight; one has a number that is none, and of one only the first micro-batch has class 0."""
    batches = [list(batch) for batch in harness.loader(32)]
    for batch in batches:
        batch[2][::4] = 0
    if reason in ("not finite", "first"):
        batches[BAD if reason == "not finite" else 0][0][1] = torch.nan
    if reason == "class":
        batches[BAD][2][4:] = 1
    return batches


def fit_skipping(rank: int, reason: str, ranks: int, **options: Any) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    module = Skipping(reason).double()
    options = {"self_check": reason == "first", "num_micro_batches": 2, **options}
    if reason == "first":  # found by the self-check, after which the step runs as a whole
        options["stages"] = None
    strategy = harness.strategy(**options) if ranks > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, devices=ranks, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, torch.utils.data.DataLoader(samples(reason), batch_size=None))  # type: ignore[arg-type]
    return module.weights, [str(each.message) for each in caught]


@pytest.mark.parametrize("reason", ["not finite", "first", "number"])
def test_a_step_skips_a_mini_batch_as_in_one_process(reason: str) -> None:
    alone, _ = fit_skipping(0, reason, 1)
    for found, _ in harness.run(2, fit_skipping, reason, 2):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, {name: theirs[name] for name in ours}, rtol=1e-12, atol=0)


def test_a_micro_batch_that_is_skipped_adds_nothing() -> None:
    (first, told), (second, _) = harness.run(2, fit_skipping, "class", 2)
    weights = [here | there for here, there in zip(first, second, strict=True)]
    module = Skipping("class").double()
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(samples("class")):
        counted = [[part[:4] for part in batch], [part[4:] for part in batch]][: 1 if number == BAD else 2]
        optimizer.zero_grad()
        sum(module.loss(half)[0] / 2 for half in counted).backward()  # type: ignore[union-attr]
        optimizer.step()
        torch.testing.assert_close(weights[number], dict(module.named_parameters()), rtol=1e-12, atol=0)
    assert any("training_step returned None for 1 of 2 micro-batches" in text for text in told)


def refused(rank: int) -> None:
    fit_skipping(rank, "number", 2, weights="stash")


def test_a_step_that_skips_without_a_flush_names_the_ways_out() -> None:
    with pytest.raises(AssertionError, match=r"(?s)returned None instead of a loss.*on_nonfinite=.?skip"):
        harness.run(2, refused)
