"""1F1B on a DAG of stages: each stage alternates backward and forward after a warm-up that follows its depth.

Stages that are slices have an order of their own (`seq_1f1b`).

Sources: PipeDream (Narayanan et al., SOSP 2019) for the alternation on a chain; GraphPipe (Jeon et al., ASPLOS 2025,
section 6) for warm-up by depth and for micro-batch sizes that differ between stages. GraphPipe prints its rule as an
image; the rule below was reconstructed from the figures in its text and from the authors' strategy files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.alternating import alternating
from lightning_gpp.schedules.in_flight import in_flight_samples
from lightning_gpp.schedules.merge import StageOrders
from lightning_gpp.schedules.registry import register
from lightning_gpp.schedules.seq_1f1b import in_slices
from lightning_gpp.slices import is_sliced

# Two arms, 0 -> 1 and 2, that join in 3; four micro-batches; each stage on its own device. Depths 3, 2, 2, 1 are the
# warm-ups. The short arm may start as late as the long arm arrives at the join, so it needs one micro-batch less.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11
#   stage 0  F0  F1  F2          B0  F3  B1      B2      B3
#   stage 1      F0  F1      B0  F2  B1  F3  B2      B3
#   stage 2  F0  F1          B0  F2  B1  F3  B2      B3
#   stage 3          F0  B0  F1  B1  F2  B2  F3  B3


@register("1f1b")
def one_f_one_b(plan: Plan, batch_size: int) -> StageOrders:
    """Warm-up forwards, then one backward and one forward in turn, then the remaining backwards, on every stage."""
    if is_sliced(plan):
        return in_slices(plan, batch_size)
    counts = warm_up(plan, batch_size)
    return {stage: _order(stage, count, len(plan.intervals(stage, batch_size))) for stage, count in counts.items()}


def _order(stage: int, warm_up: int, number: int) -> tuple[Action, ...]:
    forwards, backwards = ([Action(stage, kind, i) for i in range(number)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    return alternating(forwards, backwards, warm_up)


def warm_up(plan: Plan, batch_size: int) -> dict[int, int]:
    """For every stage the forwards before its first backward: also the most micro-batches it has in flight."""
    counts = {}
    for stage, samples in in_flight_samples(plan).items():
        wanted = samples // plan.stages[stage].micro_batch_size
        counts[stage] = min(wanted, len(plan.intervals(stage, batch_size)))
    return without_stall(plan, batch_size, counts)


def without_stall(plan: Plan, batch_size: int, counts: Mapping[int, int]) -> dict[int, int]:
    """Raise warm-ups by as little as it takes for the orders to run to their end.

    The rule of `in_flight_samples` looks at one edge at a time. Along several edges, sizes that do not divide each
    other add up (10 -> {9, 8} -> 1 -> 4 with 93 samples): a backward may need, by way of a join, a forward that comes
    after it in the same order. Such plans are rare: 92 of 8 million random ones with sizes up to 13.

    Orders are played until all stages wait; then a stage whose next forward is waited for takes it first, as if its
    warm-up had been larger from the start; and so on. With all forwards first, nothing waits, so this ends.
    """
    progress = _Progress(plan, batch_size, dict(counts))
    while not progress.run():
        progress.warm_up[progress.culprit()] += 1
    return progress.warm_up


@dataclass(slots=True)
class _Progress:
    """How many forwards and backwards each stage has done. The order follows from the counts alone: before backward
    number m come the forwards up to number m + warm-up - 1."""

    plan: Plan
    batch_size: int
    warm_up: dict[int, int]
    forwards: list[int] = field(init=False)
    backwards: list[int] = field(init=False)
    before: list[list[int]] = field(init=False)
    after: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        stages = range(len(self.plan.stages))
        edges = [edge for edge in self.plan.edges if edge.src != SOURCE]
        self.forwards, self.backwards = [0 for _ in stages], [0 for _ in stages]
        self.before = [[edge.src for edge in edges if edge.dst == stage] for stage in stages]
        self.after = [[edge.dst for edge in edges if edge.src == stage and edge.differentiable] for stage in stages]

    def run(self) -> bool:
        """Go on until nothing moves; whether all stages came to their end."""
        stages = range(len(self.plan.stages))
        moved = True
        while moved:
            moved = False
            for stage in stages:
                moved |= self._advance(stage)
        return all(self.backwards[stage] == self._number(stage) for stage in stages)

    def culprit(self) -> int:
        """The stage nearest to a sink that waits for a backward while a successor waits for its next forward."""
        depths = self.plan.depths()
        guilty = [
            before
            for stage in depths
            if self._forward_next(stage)
            for before in self.before[stage]
            if not self._forward_next(before) and self._lacks(stage, before)
        ]
        return min(guilty, key=lambda stage: (depths[stage], stage))

    def _advance(self, stage: int) -> bool:
        moved = False
        while self._ready(stage):
            done = self.forwards if self._forward_next(stage) else self.backwards
            done[stage] += 1
            moved = True
        return moved

    def _ready(self, stage: int) -> bool:
        if self._forward_next(stage):
            return not any(self._lacks(stage, before) for before in self.before[stage])
        needed = self._samples(stage, self.backwards[stage] + 1)
        done = [self._samples(after, self.backwards[after]) for after in self.after[stage]]
        return self.backwards[stage] < self._number(stage) and min(done, default=needed) >= needed

    def _forward_next(self, stage: int) -> bool:
        return self.forwards[stage] < min(self._number(stage), self.backwards[stage] + self.warm_up[stage])

    def _lacks(self, stage: int, before: int) -> bool:
        needed = self._samples(stage, self.forwards[stage] + 1)
        return self._samples(before, self.forwards[before]) < needed

    def _number(self, stage: int) -> int:
        return -(-self.batch_size // self.plan.stages[stage].micro_batch_size)

    def _samples(self, stage: int, micro_batches: int) -> int:
        return min(micro_batches * self.plan.stages[stage].micro_batch_size, self.batch_size)
