"""ZB-H2: warm-ups twice as long as those of ZB-H1, so that no stage idles if all actions take the same time.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.zb_h1 import split_orders

# A chain of three stages, six micro-batches. Stages start and stop at different times, but none idles in between.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19
#   stage 0  F0  F1  F2  F3  F4  I0  W0  F5  I1  W1  I2  W2  I3  W3  I4  W4  I5  W5
#   stage 1      F0  F1  F2  I0  F3  I1  F4  I2  W0  F5  I3  W1  I4  W2  I5  W3  W4  W5
#   stage 2          F0  I0  F1  I1  F2  I2  F3  I3  F4  I4  W0  F5  I5  W1  W2  W3  W4  W5


@register_schedule("zb_h2")
def zb_h2(plan: Plan, batch_size: int) -> StageOrders:
    """A warm-up of 2d - 1 micro-batches on a stage of depth d, with W delayed so that all stages hold the same number.

    In a chain of p stages with action times T, a stage idles (p - 1)(T_F + T_I - 2 T_W), if that is not negative, and
    holds at most 2p - 1 micro-batches.
    """
    return split_orders(plan, batch_size, lead=2)
