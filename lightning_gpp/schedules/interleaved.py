"""Interleaved 1F1B on a DAG: a device alternates between its stages, a group of micro-batches at a time.

Source: Megatron-LM (Narayanan et al., SC 2021) for a chain, where stage i is on device i modulo p, groups have p
micro-batches, and with v stages on each device, device i runs 2(p - i - 1) + (v - 1)p forwards before it alternates
forward and backward. Here every forward and backward has a slot, which follows from the depth of its stage, and a
device runs its actions in the order of slots. On that chain this is the same order; on any DAG, and for any number of
micro-batches, it is one that cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.device_orders import Orders
from lightning_gpp.schedules.modulo_slots import backward_slots, forward_slots, line, period
from lightning_gpp.schedules.nominal_times import stage_of_largest
from lightning_gpp.schedules.one_f_one_b import one_f_one_b
from lightning_gpp.schedules.registry import register_schedule

# A chain of four stages on two devices, 0 and 2 on the first, 1 and 3 on the second; four micro-batches in two groups.
# `2F1` is the forward of micro-batch 1 in stage 2.
#
#   time        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17
#   device 0  0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1       2B2       2B3  0B2  0B3
#   device 1       1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3


@register_schedule("interleaved", stages_per_device=2)
def interleaved(plan: Plan, batch_size: int) -> Orders:
    """A warm-up, then forwards and backwards in turn, on every device; 1F1B if each device holds one stage."""
    devices = range(plan.num_devices)
    if all(len(plan.stages_on(device)) == 1 for device in devices):
        return one_f_one_b(plan, batch_size)
    slots = nominal_slots(plan, batch_size)
    order = sorted(slots, key=lambda action: (slots[action], action.kind is Kind.BACKWARD))
    return Schedule(tuple(_of_device(plan, order, device, batch_size) for device in devices))


def _of_device(plan: Plan, order: Iterable[Action], device: int, batch_size: int) -> tuple[Action, ...]:
    numbers = {stage: set(plan.micro_batches(stage, device, batch_size)) for stage in plan.stages_on(device)}
    return tuple(action for action in order if action.micro_batch in numbers.get(action.stage, ()))


def nominal_slots(plan: Plan, batch_size: int) -> dict[Action, int]:
    """The slot of every action, no earlier than those of its inputs, which come first in the result.

    A micro-batch has the slot of its last sample, or that of an input if it is later, which happens if sizes do not
    divide each other.
    """
    graph, stages = plan.graph(), line(plan)
    slots: dict[Action, int] = {}
    for kind, first, order, makers in (
        (Kind.FORWARD, forward_slots(plan), stages, graph.predecessors),
        (Kind.BACKWARD, backward_slots(plan), stages[::-1], graph.successors),
    ):
        wanted = {stage: _of_samples(plan, first[stage], batch_size) for stage in order}
        for stage in order:
            for number, (_, stop) in enumerate(plan.intervals(stage, batch_size)):
                inputs = [Action(i, kind, plan.micro_batch_of(i, stop - 1, batch_size)) for i in makers(stage)]
                before = (Action(stage, Kind.FORWARD, number), Action(stage, kind, number - 1), *inputs)
                known = [slots[action] for action in before if action in slots]
                slots[Action(stage, kind, number)] = max([wanted[stage][stop - 1], *known])
    return slots


def _of_samples(plan: Plan, slots: Sequence[int], batch_size: int) -> list[int]:
    """The slot of every sample of a stage, from the slots of the first group of micro-batches."""
    length, largest = period(plan), stage_of_largest(plan)
    places = (divmod(plan.micro_batch_of(largest, sample, batch_size), len(slots)) for sample in range(batch_size))
    return [group * length + slots[index] for group, index in places]
