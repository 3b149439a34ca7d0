"""What the timer counts, on a clock that only the block under test moves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.costs.model import Seconds
from lightning_gpp.measure import timing
from lightning_gpp.measure.timing import BlockTimer
from lightning_gpp.runtime.stage import LOSS, MicroBatch

MICRO_BATCH = MicroBatch(0, 0, 2, 4)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += ctx.seconds
        return gradients[0], None, None


class Stage:
    """Forward 5 s, backward to the input 3 s, to the weight 2 s."""

    uses_random = False
    parts = ()

    def __init__(self, clock: Clock, name: str = "y") -> None:
        self.clock, self.name = clock, name
        self.weight = nn.Parameter(torch.ones(2))
        self.runs = 0

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        self.runs += 1
        self.clock.now += 5
        x = Slow.apply(values["x"], self.clock, 3.0)
        product = x * Slow.apply(self.weight, self.clock, 2.0)
        return {self.name: product.sum() if self.name == LOSS else product, "mask": values["x"].detach() > 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


def timer(budget: float = 0.0, after: Any = lambda: None) -> BlockTimer:
    return BlockTimer(device=torch.device("cpu"), context=nullcontext, budget=budget, after=after)


@pytest.mark.parametrize("name", ["y", LOSS])
def test_each_part_is_told_from_the_others(clock: Clock, name: str) -> None:
    x = torch.ones(2, requires_grad=True)
    assert timer().seconds(Stage(clock, name), {"x": x}, MICRO_BATCH) == Seconds(5, 3, 2)


def test_without_a_gradient_of_the_input_the_backward_is_the_weights(clock: Clock) -> None:
    assert timer().seconds(Stage(clock), {"x": torch.ones(2)}, MICRO_BATCH) == Seconds(5, 0, 2)


def test_what_calling_costs_is_taken_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_Nothing", lambda: Stage(clock))
    x = torch.ones(2, requires_grad=True)
    assert timer().seconds(Stage(clock), {"x": x}, MICRO_BATCH) == Seconds(0, 0, 0)


def test_repetitions_go_on_for_the_budget(clock: Clock) -> None:
    short, long = Stage(clock), Stage(clock)
    ended: list[int] = []
    timer(after=lambda: ended.append(1)).seconds(short, {"x": torch.ones(2)}, MICRO_BATCH)
    assert short.runs == 2 * (timing.WARM_UPS + timing.FEWEST)
    assert len(ended) >= timing.WARM_UPS + timing.FEWEST
    ticking = timer()
    ticking.budget = 120.0
    ticking.seconds(long, {"x": torch.ones(2)}, MICRO_BATCH)
    assert long.runs == 2 * (timing.WARM_UPS + 120 // 12)  # 12 s each: two forwards and a backward
