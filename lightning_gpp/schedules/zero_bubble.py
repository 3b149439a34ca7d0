"""Zero bubble: a heuristic for the order that idles least under the memory and the times of the plan.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 3: warm up as far as memory
and time allow, alternate, fill bubbles with weight gradients, idle only as long as another stage had to; keep the best
of several runs. That heuristic proceeds along a chain, micro-batch by micro-batch. This one proceeds in time, so it
serves any stage graph, several stages per device and any micro-batch sizes; its runs differ in the number of forwards
that run ahead. ZB-1p and ZB-2p are this schedule with memory for p and for 2p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.bubble_filling import Preference, fill, forwards_ahead
from lightning_gpp.schedules.device_orders import device_orders
from lightning_gpp.schedules.one_f_one_b import lanes, one_f_one_b
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import Work, halved, work_of

LEADS: Final = (1, 1.25, 1.5, 1.75, 2, 2.06, 2.1, 2.25, 2.5, 3)
"""Factors on the warm-up of 1F1B beyond its first micro-batch: 1 is ZB-H1's warm-up, 2 is ZB-H2's."""

CHOICES: Final = ((False, True), (False, False), (True, False))
"""Values of `forwards_first` and `patient`. The first is best for equal stages, the others often for unequal ones."""

# Two branches, 0 -> 1 and 2, that join in 3; four micro-batches; times and memory are unknown, so each action takes one
# unit and each device has memory for three micro-batches, as stage 0 needs under 1F1B.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13
#   stage 0  F0  F1  F2          I0  W0  F3  I1  W1  I2  W2  I3  W3
#   stage 1      F0  F1      I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
#   stage 2  F0  F1          I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
#   stage 3          F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3


@register_schedule("zero_bubble")
def zero_bubble(plan: Plan, batch_size: int) -> Schedule:
    """The best of several runs of list scheduling that fill bubbles with weight gradients.

    The memory limit is `plan.memory_bytes`; if that is unknown, the peak of the neediest device under 1F1B.
    """
    work = work_of(plan, batch_size)
    usual, _ = device_orders(plan, one_f_one_b(plan, batch_size), batch_size)
    return fill(
        work,
        (
            Preference(ahead=ahead, forwards_first=forwards_first, patient=patient)
            for ahead, (forwards_first, patient) in product(_leads(plan, work), CHOICES)
        ),
        known=[halved(usual.devices)],  # input gradients can be sent before their weight gradients
    )


def _leads(plan: Plan, work: Work) -> Iterable[Sequence[int]]:
    """The forwards by which each stage may be ahead, over all its slices, for every run; without duplicates."""
    numbers = [len(parts) * len(plan.intervals(stage, work.batch_size)) for stage, parts in enumerate(_slices(plan))]
    leads = (forwards_ahead(plan, lead) for lead in LEADS)
    return dict.fromkeys(tuple(map(min, lead, numbers)) for lead in leads)


def _slices(plan: Plan) -> list[list[int]]:
    """All slices of the same unsliced stage, for every stage."""
    return [parts for _, parts in sorted((part, parts) for parts in lanes(plan).values() for part in parts)]
