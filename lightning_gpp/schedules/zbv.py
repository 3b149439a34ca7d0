"""ZB-V: a V of two stages per device, without bubbles if forwards and both halves of backwards take the same time.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 6.
"""

from __future__ import annotations

from itertools import chain

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Schedule
from lightning_gpp.schedules.building_blocks import compact, compacted, compacted_blocks, compaction_limits, fastest
from lightning_gpp.schedules.nominal_times import Template, actions, actions_of, by_nominal_time
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.v_half import V_HALF
from lightning_gpp.schedules.v_min import V_MIN
from lightning_gpp.schedules.work import work_of

# Two devices, four micro-batches; capital letters are stages 0 and 1, small ones stages 3 and 2.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
#   device 0  F0  F1  F2  f0  i0  w0  f1  i1  w1  F3  I0  W0  f2  i2  w2  I1  W1  f3  i3  w3  I2  W2  I3  W3
#   device 1      F0  f0  F1  f1  i0  w0  F2  I0  W0  f2  i1  w1  F3  I1  W1  f3  i2  w2  I2  i3  I3  W2  w3  W3


@register_schedule("zbv", layout="zigzag", stages_per_device=2)
def zbv(plan: Plan, batch_size: int) -> Schedule:
    """The published order, or that order compacted with the plan's times if that is faster; the memory of 1F1B.

    If it does not fit `plan.memory_bytes`, V-Half or V-Min.
    """
    work = work_of(plan, batch_size)
    template = Template(plan, batch_size, v_order)
    rows = by_nominal_time(work, template.time)
    full = actions(rows)
    peaks = work.peaks(full)
    if not work.fits(peaks):
        return compacted_blocks(plan, batch_size, (V_HALF, V_MIN))
    limits = compaction_limits(work, peaks)
    trials = chain([compact(work, full, limits)], compacted(work, actions(rows, weights=False), limits))
    return work.order(fastest(work, trials).rows)


def v_order(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """The order of a rank of the V. In the steps, 0 is its stage on the way down, 1 its stage on the way up."""
    left = num_ranks - rank
    full = num_micro_batches - num_ranks - left + 1
    steps = ["F0"] * (2 * left - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * left
    steps += ["F0", "I0", "W0", "F1", "I1", "W1"] * full + ["I0", "W0", "F1", "I1", "W1"] * (left - 1)
    steps += ["I0", "I1"] * rank + ["I0", "W0"] * left + ["W1"] * rank + ["W0"] * rank
    return actions_of(steps, (rank, 2 * num_ranks - 1 - rank))
