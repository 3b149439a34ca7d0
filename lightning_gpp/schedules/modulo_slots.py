"""Slots: when each micro-batch of a group passes each stage, if one group follows the other without a pause.

In a slot a device does one forward and one backward. A group takes as many slots as its busiest device has forwards.
Slots that lie a multiple of this period apart meet, because other groups are there at the same time; so each device
gives every slot of a period to one micro-batch and stage. That is modulo scheduling, known from loops in compilers (Rau
and Glaeser, MICRO 1981). A chain of stages laid in a loop is the case in which the first slot is always free.

A stage that is known to take next to no time, such as one with the user's step alone, takes no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from lightning_gpp.plan import Plan

Slots = dict[int, list[int]]
"""For every stage the slot of each micro-batch of a group, ascending."""

SHORT: Final = 0.1
"""Part of the longest forward, per sample, below which a stage takes no slot."""


def line(plan: Plan) -> list[int]:
    """All stages by their distance to the sink, the farthest first; those at one distance in their order in the plan.

    So branches lie side by side, as where several stages are laid on each device.
    """
    depths = plan.depths()
    return sorted(depths, key=lambda stage: (-depths[stage], stage))


def group_size(plan: Plan) -> int:
    """Micro-batches that a device runs through a stage before it goes on to its next stage.

    As many as there are steps from the one to the other, for the pair that is farthest apart: when the device is done
    with them, the first one is there again. No more than there are devices, which is what stages laid in a loop need.
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
    """Slots of the forwards. A stage on a short way to the sink starts as late as the longest way allows."""
    graph, ahead = plan.graph(), _ahead(plan)
    table = _Table(plan, group_size(plan), period(plan), weights(plan))
    for stage in line(plan):
        inputs = [[slot + table.takes[stage] for slot in table.slots[i]] for i in graph.predecessors(stage)]
        table.enter(stage, inputs, max(ahead.values()) - ahead[stage])
    return table.slots


def backward_slots(plan: Plan) -> Slots:
    """Slots of the backwards. Those of the first micro-batch are not before its forwards, first in a slot."""
    graph, forwards = plan.graph(), forward_slots(plan)
    table = _Table(plan, group_size(plan), period(plan), weights(plan))
    for stage in reversed(line(plan)):
        inputs = [[slot + table.takes[i] for slot in table.slots[i]] for i in graph.successors(stage)]
        table.enter(stage, inputs, 0)
    start = max(forwards[stage][0] - slots[0] for stage, slots in table.slots.items())
    return {stage: [start + slot for slot in slots] for stage, slots in table.slots.items()}


def weights(plan: Plan) -> list[int]:
    """For every stage the slots that a micro-batch takes, 1 or 0; 1 where seconds are not known."""
    seconds = [
        stage.figures.forward_seconds.at(stage.micro_batch_size) / stage.micro_batch_size for stage in plan.stages
    ]
    return [int(own >= SHORT * max(seconds)) for own in seconds]


def _ahead(plan: Plan) -> dict[int, int]:
    """For every stage the slots on the longest way from its end to the sink's end."""
    graph, takes = plan.graph(), weights(plan)
    ahead: dict[int, int] = {}
    for stage in reversed(line(plan)):
        ahead[stage] = max((ahead[i] + takes[i] for i in graph.successors(stage)), default=0)
    return ahead


@dataclass(slots=True)
class _Table:
    """Which slots of a period each device has given away."""

    plan: Plan
    number: int
    period: int
    takes: Sequence[int]
    slots: Slots = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, stage: int, inputs: Sequence[Sequence[int]], earliest: int) -> None:
        """Give a stage its slots, none before `earliest` or before that of any of the inputs."""
        self.slots[stage] = []
        for index in range(self.number):
            earliest = max([earliest, *(row[index] for row in inputs)])
            earliest = self._free(stage, earliest)
            self.slots[stage].append(earliest)

    def _free(self, stage: int, earliest: int) -> int:
        """The first slot that is free on all devices of the stage; where they have none in common, the earliest."""
        for slot in range(earliest, earliest + self.period * self.takes[stage]):
            places = {(device, slot % self.period) for device in self.plan.devices_of(stage)}
            if not places & self.taken:
                self.taken |= places
                return slot
        return earliest
