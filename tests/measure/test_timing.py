"""What the timer counts, on a clock that only the block under test moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.measure import timing
from lightning_gpp.measure.timing import BlockTimer
from lightning_gpp.runtime.stage import LOSS, MicroBatch

MICRO_BATCH = MicroBatch(0, 0, 2, 4)


class Clock:
    now = 0.0

    def seconds_of(self, call: Callable[[], object], at_most: float) -> float:
        before = self.now
        call()
        return self.now - before


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.clock.now += 3
        return gradients[0], None


class Stage:
    """Forward 5 s, backward 3 s."""

    uses_random = False
    parts = ()

    def __init__(self, clock: Clock, name: str = "y", trained: bool = True) -> None:
        self.clock, self.name = clock, name
        self.weight = nn.Parameter(torch.ones(2), requires_grad=trained)

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        self.clock.now += 5
        product = values["x"] * Slow.apply(self.weight, self.clock)
        return {self.name: product.sum() if self.name == LOSS else product, "mask": values["x"].detach() > 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "seconds_of", clock.seconds_of)
    return clock


def timer() -> BlockTimer:
    return BlockTimer(device=torch.device("cpu"), context=nullcontext, budget=0.0, after=lambda: None)


@pytest.mark.parametrize("name", ["y", LOSS])
def test_forwards_are_told_from_backwards(clock: Clock, name: str) -> None:
    assert timer().seconds(Stage(clock, name), {"x": torch.ones(2, requires_grad=True)}, MICRO_BATCH) == (5, 3)


def test_without_gradients_there_is_no_backward(clock: Clock) -> None:
    assert timer().seconds(Stage(clock, trained=False), {"x": torch.ones(2)}, MICRO_BATCH) == (5, 0)


def test_what_calling_costs_is_taken_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_Nothing", lambda: Stage(clock))
    assert timer().seconds(Stage(clock), {"x": torch.ones(2, requires_grad=True)}, MICRO_BATCH) == (0, 0)
