"""Interleaved 1F1B on a DAG: a device alternates between its stages, a group of micro-batches at a time.

Source: Megatron-LM (Narayanan et al., SC 2021) for a chain, where stage i is on device i modulo p, groups have p
micro-batches, and with v stages on each device, device i runs 2(p - i - 1) + (v - 1)p forwards before it alternates
forward and backward. Here every forward and backward has a slot, which follows from the depth of its stage, and a
device runs its actions in the order of slots. On that chain this is the same order; on any DAG, and for any number of
micro-batches, it is one that cannot deadlock.

In a slot a device runs one forward and one backward. Groups of micro-batches follow each other without a pause: from
one to the next it takes as many slots as the busiest device has forwards of a group. A stage that takes almost no time,
such as one with only the user's step, takes no slot.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.device_orders import Orders
from lightning_gpp.schedules.nominal_times import actions, by_nominal_time, stage_of_largest
from lightning_gpp.schedules.one_f_one_b import one_f_one_b
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import work_of

# A chain of four stages on two devices, 0 and 2 on the first, 1 and 3 on the second; four micro-batches in two groups.
# `2F1` is the forward of micro-batch 1 in stage 2.
#
#   time        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17
#   device 0  0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1       2B2       2B3  0B2  0B3
#   device 1       1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3


@register_schedule("interleaved", stages_per_device=2)
def interleaved(plan: Plan, batch_size: int) -> Orders:
    """A warm-up, then forwards and backwards in turn, on every device; 1F1B if each device holds one stage."""
    if all(len(plan.stages_on(device)) == 1 for device in range(plan.num_devices)):
        return one_f_one_b(plan, batch_size)
    ahead, size, period, largest = slots_ahead(plan), group_size(plan), slots_of_group(plan), stage_of_largest(plan)
    last = max(ahead.values())

    def time(action: Action) -> float:
        _, stop = plan.intervals(action.stage, batch_size)[action.micro_batch]
        group, index = divmod(plan.micro_batch_of(largest, stop - 1, batch_size), size)
        way = ahead[action.stage] + 0.5 if action.kind is Kind.BACKWARD else -ahead[action.stage]
        return group * period + index + last + way

    rows = actions(by_nominal_time(work_of(plan, batch_size, split=False), time))
    return Schedule(tuple(map(tuple, rows)))


SHORT: Final = 0.1
"""Fraction of the longest forward, per sample, below which a stage takes no slot."""


def line(plan: Plan) -> list[int]:
    """All stages by their distance to the sink, the farthest first; stages at one distance in the plan's order.

    In layouts with several stages per device, branches are side by side in this line.
    """
    depths = plan.depths()
    return sorted(depths, key=lambda stage: (-depths[stage], stage))


def group_size(plan: Plan) -> int:
    """Number of micro-batches that a device runs on one stage before it goes on to its next stage.

    It is the largest number of slots between two neighbouring stages of a device, so that the first micro-batch has
    come back when the device has finished the group, but at most the number of devices, as for a loop layout.
    """
    ahead, takes = slots_ahead(plan), _slots_taken(plan)
    stages = [stage for stage in line(plan) if takes[stage]]
    rows = [[ahead[i] for i in stages if device in plan.devices_of(i)] for device in range(plan.num_devices)]
    steps = [far - near for row in rows for far, near in pairwise(row)]
    return max(1, min(plan.num_devices, max(steps, default=1)))


def slots_of_group(plan: Plan) -> int:
    """Slots from one group to the next: the forwards of a group on the busiest device."""
    takes = _slots_taken(plan)
    loads = (sum(takes[stage] for stage in plan.stages_on(device)) for device in range(plan.num_devices))
    return group_size(plan) * max(1, *loads)


def _slots_taken(plan: Plan) -> list[int]:
    """Slots that a micro-batch takes on every stage: 0 if the stage is known to be short, otherwise 1."""
    seconds = [
        stage.figures.forward_seconds.at(stage.micro_batch_size) / stage.micro_batch_size for stage in plan.stages
    ]
    return [int(own >= SHORT * max(seconds)) for own in seconds]


def slots_ahead(plan: Plan) -> dict[int, int]:
    """Slots on the longest path from the end of every stage to the end of the sink."""
    graph, takes = plan.graph(), _slots_taken(plan)
    ahead: dict[int, int] = {}
    for stage in reversed(line(plan)):
        ahead[stage] = max((ahead[i] + takes[i] for i in graph.successors(stage)), default=0)
    return ahead
