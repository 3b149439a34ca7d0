"""Breadth-first: a device runs all micro-batches of one stage before its next stage (Lamy-Poirier, MLSys 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.interleaved import line
from lightning_gpp.schedules.registry import register_schedule

# A chain of four stages on two devices, 0 and 2 on the first, 1 and 3 on the second; four micro-batches. `2F1` is the
# forward of micro-batch 1 in stage 2.
#
#   time        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17
#   device 0  0F0  0F1  0F2  0F3  2F0  2F1  2F2  2F3            2B0  2B1  2B2  2B3  0B0  0B1  0B2  0B3
#   device 1       1F0  1F1  1F2  1F3  3F0  3F1  3F2  3F3  3B0  3B1  3B2  3B3  1B0  1B1  1B2  1B3


@register_schedule("breadth_first", stages_per_device=2)
def breadth_first(plan: Plan, batch_size: int) -> Schedule:
    """All forwards stage by stage, the farthest from the sink first, then all backwards in reverse order of stages.

    Every micro-batch stays in flight. Sharded parameters are gathered once per stage and direction, whatever the number
    of micro-batches.
    """
    return Schedule(tuple(tuple(_order(plan, device, batch_size)) for device in range(plan.num_devices)))


def _order(plan: Plan, device: int, batch_size: int) -> Iterator[Action]:
    stages = [stage for stage in line(plan) if device in plan.devices_of(stage)]
    for kind, visits in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1])):
        for stage in visits:
            yield from (Action(stage, kind, number) for number in plan.micro_batches(stage, device, batch_size))
