"""Zero bubble: the order that idles least under the memory and the times of the plan, found by a heuristic.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 3: warm up as far as memory
and time allow, alternate, fill with gradients of parameters where a stage would wait, waiting only as long as another
stage had to; keep the best of several runs. That heuristic goes through a chain micro-batch by micro-batch. This one
goes through time, so it serves any graph of stages, several of them on a device and micro-batches of any sizes; and its
runs differ in how far forwards run ahead. ZB-1p and ZB-2p are this schedule with room for p and for 2p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.filling import Policy, fill
from lightning_gpp.schedules.lanes import FORWARD, INPUT, Lane, Work, counts_of, samples_ahead, work_of
from lightning_gpp.schedules.registry import register

LEADS: Final = (1, 1.25, 1.5, 1.75, 2, 2.1, 2.25, 2.5, 3)
"""How far a stage runs ahead of its successors, in what 1F1B does: 1 is ZB-H1's warm-up, 2 is ZB-H2's."""

CHOICES: Final = ((False, True), (False, False), (True, False))
"""Forwards first, and patient: where stages are equal the first finds the best order, else often one of the others."""

# Two arms, 0 -> 1 and 2, that join in 3; four micro-batches; times and memory are not known, so that each action takes
# one unit and each device has room for three micro-batches, as stage 0 has in 1F1B.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13
#   stage 0  F0  F1  F2          I0  W0  F3  I1  W1  I2  W2  I3  W3
#   stage 1      F0  F1      I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
#   stage 2  F0  F1          I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
#   stage 3          F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3


@register("zero_bubble")
def zero_bubble(plan: Plan, batch_size: int) -> Schedule:
    """The best of several runs of a clock that fills waits with gradients of parameters.

    Keeps to `plan.memory_bytes` where it can; where they are not known, to what the device that needs most keeps under
    1F1B.
    """
    work = work_of(plan, batch_size)
    return fill(
        work,
        (
            Policy(ahead=ahead, forwards_first=forwards_first, patient=patient)
            for ahead, (forwards_first, patient) in product(_leads(plan, work), CHOICES)
        ),
    )


def _leads(plan: Plan, work: Work) -> Iterator[list[int]]:
    """For every run and lane by how many micro-batches forwards may be ahead."""
    yield from (counts_of(plan, work, samples_ahead(plan, lead)) for lead in LEADS)
    yield _until_first_return(work)


def _until_first_return(work: Work) -> list[int]:
    """For every lane the forwards that it can do until the first gradients come back to it."""
    trips: list[float] = [0.0 for _ in work.lanes]
    for lane, entry in reversed(list(enumerate(work.lanes))):
        for reader, _, _, travel in work.readers[FORWARD][lane][0] if entry.numbers else ():
            after = work.lanes[reader].seconds
            trips[lane] = max(trips[lane], trips[reader] + after[FORWARD][0] + after[INPUT][0] + 2 * travel)
    return [_forwards_within(trip, lane) for trip, lane in zip(trips, work.lanes, strict=True)]


def _forwards_within(seconds: float, lane: Lane) -> int:
    longest = max(lane.seconds[FORWARD], default=0.0)
    return 1 + int(seconds / longest + 1e-9) if longest else max(1, len(lane.numbers))
