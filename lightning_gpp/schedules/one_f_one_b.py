"""1F1B on a DAG of stages: each stage alternates backward and forward after a warm-up given by its depth.

Sources: PipeDream (Narayanan et al., SOSP 2019) for the alternation on a chain; GraphPipe (Jeon et al., ASPLOS 2025,
section 6) for warm-up by depth and for micro-batch sizes that differ between stages. GraphPipe prints its rule as an
image; the rule below was reconstructed from the figures in its text and from the authors' strategy files.

Sliced stages alternate backward and forward of slices: Seq1F1B (Sun et al., 2024, arXiv:2406.03488), which is for
chains; on a graph the distance to the sink takes the place of the number of stages that follow. Forwards go from the
first slice to the last, backwards from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders, device_orders
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.warm_up import alternating, in_flight_samples, slices_ahead, without_deadlock
from lightning_gpp.slices import unsliced

LaneOrder = Callable[[int, int], tuple[Action, ...]]
"""From the first slice of a stage and a warm-up to the order of all its slices."""

# Two branches, 0 -> 1 and 2, that join in 3; four micro-batches; each stage on its own device. The warm-ups are the
# depths 3, 2, 2, 1. The short branch can start when the long one reaches the join, so it holds one micro-batch less.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11
#   stage 0  F0  F1  F2          B0  F3  B1      B2      B3
#   stage 1      F0  F1      B0  F2  B1  F3  B2      B3
#   stage 2  F0  F1          B0  F2  B1  F3  B2      B3
#   stage 3          F0  B0  F1  B1  F2  B2  F3  B3


@register_schedule("1f1b")
def one_f_one_b(plan: Plan, batch_size: int) -> StageOrders:
    """Warm-up forwards, then one backward and one forward in turn, then the remaining backwards, on every stage."""
    if plan.is_sliced:
        return in_slices(plan, batch_size)
    counts = warm_up(plan, batch_size)
    return {stage: _order(stage, count, len(plan.intervals(stage, batch_size))) for stage, count in counts.items()}


def _order(stage: int, warm_up: int, number: int) -> tuple[Action, ...]:
    forwards, backwards = ([Action(stage, kind, i) for i in range(number)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    return alternating(forwards, backwards, warm_up)


def warm_up(plan: Plan, batch_size: int) -> dict[int, int]:
    """For every stage the forwards before its first backward; also its maximum of micro-batches in flight."""
    counts = {}
    for stage, samples in in_flight_samples(plan).items():
        wanted = samples // plan.stages[stage].micro_batch_size
        counts[stage] = min(wanted, len(plan.intervals(stage, batch_size)))
    return without_deadlock(plan, batch_size, counts)


# A chain of two stages, two micro-batches in two slices: `F1b` is the forward of slice b of micro-batch 1. A backward
# takes as long as a forward. Stage 0 holds three slices, stage 1 two: one and a half micro-batches, and one.
#
#   time      0    1    2    3    4    5    6    7    8    9
#   stage 0  F0a  F0b  F1a       B0b  F1b  B0a       B1b  B1a
#   stage 1       F0a  F0b  B0b  F1a  B0a  F1b  B1b  B1a


def in_slices(plan: Plan, batch_size: int) -> StageOrders:
    """The order of all slices of each stage together, under the number of the first slice."""
    parts = lanes(plan)

    def lane(first: int, warm_up: int) -> tuple[Action, ...]:
        forwards = forwards_of(plan, parts[first], batch_size)
        return alternating(forwards, backwards_of(plan, parts[first], batch_size), warm_up)

    return without_deadlock_in_slices(plan, batch_size, slices_ahead(plan), lane)


def lanes(plan: Plan) -> dict[int, list[int]]:
    """The slices of every stage, by the first one."""
    full = unsliced(plan)
    return {members[0]: members for members in map(full.parts, range(len(full.plan.stages)))}


def forwards_of(plan: Plan, members: Sequence[int], batch_size: int) -> list[Action]:
    """All forwards of a stage's slices, in order."""
    number = len(plan.intervals(members[0], batch_size))
    return [Action(part, Kind.FORWARD, index) for index in range(number) for part in members]


def backwards_of(plan: Plan, members: Sequence[int], batch_size: int, kind: Kind = Kind.BACKWARD) -> list[Action]:
    """All backwards of a stage's slices, or halves of one kind, in order."""
    number = len(plan.intervals(members[0], batch_size))
    return [Action(part, kind, index) for index in range(number) for part in reversed(members)]


def without_deadlock_in_slices(plan: Plan, batch_size: int, warm_up: Mapping[int, int], lane: LaneOrder) -> StageOrders:
    """The orders with the warm-ups, all raised by as little as it takes for the orders not to deadlock.

    Raises:
        ScheduleError: they deadlock even with all forwards first.
    """
    counts = dict(warm_up)
    while True:
        orders = {first: lane(first, count) for first, count in counts.items()}
        try:
            device_orders(plan, orders, batch_size)
        except ScheduleError:
            if all(2 * count >= len(orders[first]) for first, count in counts.items()):
                raise
            counts = {first: count + 1 for first, count in counts.items()}  # with all forwards first, nothing waits
        else:
            return orders
