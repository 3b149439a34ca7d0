"""Modulo scheduling: slots for the micro-batches of a group, such that groups follow each other without a pause.

In a slot a device runs one forward and one backward. The period is the number of slots of a group: the forwards of the
busiest device. Slots a multiple of the period apart collide, because other groups use them at the same time; so each
device reserves every slot of a period for one micro-batch and stage. Compilers schedule loops in this way (Rau and
Glaeser, MICRO 1981). For a chain of stages in a loop layout the first slot is always free.

A stage that takes almost no time, such as one with only the user's step, takes no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from lightning_gpp.plan import Plan

Slots = dict[int, list[int]]
"""The slots of every stage for the micro-batches of a group, ascending."""

SHORT: Final = 0.1
"""Fraction of the longest forward, per sample, below which a stage takes no slot."""


def line(plan: Plan) -> list[int]:
    """All stages by their distance to the sink, the farthest first; stages at one distance in the plan's order.

    Layouts with several stages per device put branches side by side in the same way.
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
