"""Interleaved 1F1B on a DAG: a device alternates between its stages, a group of micro-batches at a time.

Source: Megatron-LM (Narayanan et al., SC 2021) for a chain, where stage i is on device i modulo p, groups have p
micro-batches, and with v stages on each device, device i runs 2(p - i - 1) + (v - 1)p forwards before it alternates
forward and backward. Here every forward and backward has a slot, which follows from the depth of its stage, and a
device runs its actions in the order of slots. On that chain this is the same order; on any DAG, and for any number of
micro-batches, it is one that cannot deadlock.

Slots come from modulo scheduling (Rau and Glaeser, MICRO 1981): groups of micro-batches follow each other without a
pause. In a slot a device runs one forward and one backward. The period is the number of slots of a group: the forwards
of the busiest device. Slots a multiple of the period apart collide, because other groups use them at the same time; so
each device reserves every slot of a period for one micro-batch and stage. For a chain of stages in a loop layout the
first slot is always free. A stage that takes almost no time, such as one with only the user's step, takes no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
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
    slots = {
        kind: {stage: _of_samples(plan, rows[stage], batch_size) for stage in rows}
        for kind, rows in ((Kind.FORWARD, forward_slots(plan)), (Kind.BACKWARD, backward_slots(plan)))
    }

    def time(action: Action) -> float:
        _, stop = plan.intervals(action.stage, batch_size)[action.micro_batch]
        return slots[action.kind][action.stage][stop - 1] + 0.5 * (action.kind is Kind.BACKWARD)

    rows = actions(by_nominal_time(work_of(plan, batch_size, split=False), time))
    return Schedule(tuple(map(tuple, rows)))


def _of_samples(plan: Plan, slots: Sequence[int], batch_size: int) -> list[int]:
    """The slot of every sample of a stage, from those of the first group of micro-batches; they never fall."""
    length, largest = period(plan), stage_of_largest(plan)
    places = (divmod(plan.micro_batch_of(largest, sample, batch_size), len(slots)) for sample in range(batch_size))
    return list(accumulate((group * length + slots[index] for group, index in places), max))


Slots = dict[int, list[int]]
"""The slots of every stage for the micro-batches of a group, ascending."""

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
    ahead, takes = _ahead(plan), weights(plan)
    stages = [stage for stage in line(plan) if takes[stage]]
    rows = [[ahead[i] for i in stages if device in plan.devices_of(i)] for device in range(plan.num_devices)]
    steps = [far - near for row in rows for far, near in pairwise(row)]
    return max(1, min(plan.num_devices, max(steps, default=1)))


def period(plan: Plan) -> int:
    """Slots from one group to the next: the forwards of a group on the busiest device."""
    takes = weights(plan)
    loads = (sum(takes[stage] for stage in plan.stages_on(device)) for device in range(plan.num_devices))
    return group_size(plan) * max(1, *loads)


def forward_slots(plan: Plan) -> Slots:
    """Slots of the forwards. A stage on a short path to the sink starts as late as the longest path allows."""
    graph, ahead = plan.graph(), _ahead(plan)
    table = _ReservationTable(plan, group_size(plan), period(plan), weights(plan))
    for stage in line(plan):
        inputs = [[slot + table.takes[stage] for slot in table.slots[i]] for i in graph.predecessors(stage)]
        table.enter(stage, inputs, max(ahead.values()) - ahead[stage])
    return table.slots


def backward_slots(plan: Plan) -> Slots:
    """Slots of the backwards, no earlier than the forwards of the first micro-batch, which come first in a slot."""
    graph, forwards = plan.graph(), forward_slots(plan)
    table = _ReservationTable(plan, group_size(plan), period(plan), weights(plan))
    for stage in reversed(line(plan)):
        inputs = [[slot + table.takes[i] for slot in table.slots[i]] for i in graph.successors(stage)]
        table.enter(stage, inputs, 0)
    start = max(forwards[stage][0] - slots[0] for stage, slots in table.slots.items())
    return {stage: [start + slot for slot in slots] for stage, slots in table.slots.items()}


def weights(plan: Plan) -> list[int]:
    """Slots that a micro-batch takes on every stage: 0 if the stage is known to be short, otherwise 1."""
    seconds = [
        stage.figures.forward_seconds.at(stage.micro_batch_size) / stage.micro_batch_size for stage in plan.stages
    ]
    return [int(own >= SHORT * max(seconds)) for own in seconds]


def _ahead(plan: Plan) -> dict[int, int]:
    """Slots on the longest path from the end of every stage to the end of the sink."""
    graph, takes = plan.graph(), weights(plan)
    ahead: dict[int, int] = {}
    for stage in reversed(line(plan)):
        ahead[stage] = max((ahead[i] + takes[i] for i in graph.successors(stage)), default=0)
    return ahead


@dataclass(slots=True)
class _ReservationTable:
    """The slots of a period that devices have reserved."""

    plan: Plan
    number: int
    period: int
    takes: Sequence[int]
    slots: Slots = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, stage: int, inputs: Sequence[Sequence[int]], earliest: int) -> None:
        """Reserve the slots of a stage, none before `earliest` or before its inputs."""
        self.slots[stage] = []
        for index in range(self.number):
            earliest = max([earliest, *(row[index] for row in inputs)])
            earliest = self._free(stage, earliest)
            self.slots[stage].append(earliest)

    def _free(self, stage: int, earliest: int) -> int:
        """The first slot that is free on all devices of the stage; if there is none, the earliest one."""
        for slot in range(earliest, earliest + self.period * self.takes[stage]):
            places = {(device, slot % self.period) for device in self.plan.devices_of(stage)}
            if not places & self.taken:
                self.taken |= places
                return slot
        return earliest
