"""1F1B where stages are slices: a stage alternates backward and forward of slices.

Source: Sun et al., Seq1F1B, 2024 (arXiv:2406.03488), for chains; on a graph the distance to the sink takes the place of
the number of stages behind. Forwards go from the first slice to the last, backwards from the last to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.in_flight import slices_in_flight
from lightning_gpp.schedules.merge import StageOrders, merge
from lightning_gpp.slices import unsliced

# A chain of two stages, two micro-batches in two slices: `F1b` is the forward of slice b of micro-batch 1. A backward
# takes as long as a forward. Stage 0 holds three slices, stage 1 two: one and a half micro-batches, and one.
#
#   time      0    1    2    3    4    5    6    7    8    9
#   stage 0  F0a  F0b  F1a       B0b  F1b  B0a       B1b  B1a
#   stage 1       F0a  F0b  B0b  F1a  B0a  F1b  B1b  B1a


def in_slices(plan: Plan, batch_size: int) -> StageOrders:
    """The order of each stage, all its slices together, under the number of its first slice."""
    whole = unsliced(plan)
    flying = slices_in_flight(plan)
    parts = {members[0]: members for members in map(whole.parts, range(len(whole.plan.stages)))}
    counts = {
        first: sum(flying[part] // plan.stages[part].micro_batch_size for part in parts[first]) for first in parts
    }
    while True:
        orders = _orders(plan, parts, counts, batch_size)
        try:
            merge(plan, orders, batch_size)
        except ScheduleError:
            if all(2 * count >= len(orders[first]) for first, count in counts.items()):
                raise
            counts = {first: count + 1 for first, count in counts.items()}  # with all forwards first, nothing waits
        else:
            return orders


def _orders(
    plan: Plan, parts: Mapping[int, Sequence[int]], counts: Mapping[int, int], batch_size: int
) -> dict[int, tuple[Action, ...]]:
    orders = {}
    for first, members in parts.items():
        number = len(plan.intervals(first, batch_size))
        forwards = [Action(part, Kind.FORWARD, index) for index in range(number) for part in members]
        backwards = [Action(part, Kind.BACKWARD, index) for index in range(number) for part in reversed(members)]
        orders[first] = _alternating(forwards, backwards, counts[first])
    return orders


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    actions = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        actions += [backward, *forwards[warm_up + index : warm_up + index + 1]]
    return tuple(actions)
