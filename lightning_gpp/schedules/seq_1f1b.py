"""Seq1F1B: 1F1B for sliced stages, which alternate backward and forward of slices.

Source: Sun et al., Seq1F1B, 2024 (arXiv:2406.03488), for chains; on a graph the distance to the sink takes the place of
the number of stages that follow. Forwards go from the first slice to the last, backwards from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.alternating import alternating
from lightning_gpp.schedules.device_orders import StageOrders, device_orders
from lightning_gpp.schedules.warm_up import slices_ahead
from lightning_gpp.slices import unsliced

# A chain of two stages, two micro-batches in two slices: `F1b` is the forward of slice b of micro-batch 1. A backward
# takes as long as a forward. Stage 0 holds three slices, stage 1 two: one and a half micro-batches, and one.
#
#   time      0    1    2    3    4    5    6    7    8    9
#   stage 0  F0a  F0b  F1a       B0b  F1b  B0a       B1b  B1a
#   stage 1       F0a  F0b  B0b  F1a  B0a  F1b  B1b  B1a

LaneOrder = Callable[[int, int], tuple[Action, ...]]
"""From the first slice of a stage and a warm-up to the order of all its slices."""


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
