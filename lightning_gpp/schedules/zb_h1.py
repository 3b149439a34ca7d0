"""ZB-H1: the order and the memory of 1F1B, with weight gradients that fill most of its bubble.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.handcrafted import split_orders
from lightning_gpp.schedules.registry import register_schedule

# A chain of three stages, five micro-batches. Every stage holds up to three of them, the last stage two for W only.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16
#   stage 0  F0  F1  F2          I0  W0  F3  I1  W1  F4  I2  W2  I3  W3  I4  W4
#   stage 1      F0  F1      I0  F2  I1  W0  F3  I2  W1  F4  I3  W2  I4  W3  W4
#   stage 2          F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  F4  I4  W2  W3  W4


@register_schedule("zb_h1")
def zb_h1(plan: Plan, batch_size: int) -> StageOrders:
    """1F1B with W delayed: by the difference between the deepest stage's number of micro-batches in flight and the
    stage's.

    In a chain of p stages with action times T, a stage idles (p - 1)(T_F + T_I - T_W) and holds at most p
    micro-batches: on a stage of depth d, d of them in full and p - d for W only.
    """
    return split_orders(plan, batch_size, lead=1)
