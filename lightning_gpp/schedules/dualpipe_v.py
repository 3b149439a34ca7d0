"""DualPipeV: a V of two stages per device. Forwards are paired with backwards, so that each hides the other's messages.

Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2.1, and the order published as deepseek-ai/DualPipe.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Schedule
from lightning_gpp.schedules.nominal_times import Template, actions, actions_of, by_nominal_time
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import work_of

# Two devices, four micro-batches; capital letters are stages 0 and 1, small ones stages 3 and 2. B takes two units.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
#   device 0  F0  F1  F2  f0  i0  w0  f1  F3  b1      f2  B0      b2      f3      B1      b3      I2  W2  I3  W3
#   device 1      F0  f0  F1  f1  F2  b0      f2  B0      F3  b1      f3  B1      b2      B2      i3  I3  w3  W3


@register_schedule("dualpipe_v", layout="zigzag", stages_per_device=2)
def dualpipe_v(plan: Plan, batch_size: int) -> Schedule:
    """The published order. Backwards are split only at both ends, where a device would idle otherwise.

    It holds one micro-batch more of one stage than ZB-V, and needs twice as many micro-batches as devices to fill the
    pipeline; with fewer, it is the same order without the missing ones.
    """
    work = work_of(plan, batch_size)
    template = Template(plan, batch_size, paired_order)
    rows = by_nominal_time(work, template.time)
    return work.order(actions(rows), full=lambda action: not template.is_split(action))


def paired_order(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """The order of a rank of the V. In the steps, 0 is its stage on the way down, 1 its stage on the way up."""
    near, left = rank + 1, num_ranks - rank - 1
    steps = ["F0"] * (2 * left) + ["F0", "F1"] * near + ["I1", "W", "F1"] * left
    steps += ["F0", "B1", "F1", "B0"] * (num_micro_batches - 2 * num_ranks + near) + ["B1", "F1", "B0"] * left
    ends = ["1", "0"] * near
    steps += ["B" + stage for stage in ends[:near]] + ["I" + stage for stage in ends[near:]]
    steps += ["W", "I0"] * left + ["W"] * near
    return actions_of(steps, (rank, 2 * num_ranks - 1 - rank))
