"""Hanayo: 1F1B in waves. With a zigzag layout a wave turns back without leaving its device.

Source: Liu et al., Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency,
SC 2023. W waves are 2W stages per device.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.device_orders import Orders
from lightning_gpp.schedules.one_f_one_b import one_f_one_b
from lightning_gpp.schedules.registry import register_schedule

# A chain of four stages on two devices, 0 and 3 on the first, 1 and 2 on the second: one wave; four micro-batches.
# `2F1` is the forward of micro-batch 1 in stage 2.
#
#   time        0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17
#   device 0  0F0  0F1  0F2  3F0  3B0  3F1  3B1  0F3  0B0  3F2  3B2       0B1  3F3  3B3  0B2       0B3
#   device 1       1F0  2F0  1F1  2F1  2B0  1F2  1B0  2F2  2B1  1F3  1B1  2F3  2B2  1B2  2B3  1B3


@register_schedule("hanayo", layout="zigzag", stages_per_device=2)
def hanayo(plan: Plan, batch_size: int) -> Orders:
    """1F1B by the depth of each stage; the waves come from the layout.

    Of several ready actions a device runs a backward first, then the forward nearest to the sink. More waves shorten
    the bubble; with more micro-batches than devices they also hold more of them in flight.
    """
    return one_f_one_b(plan, batch_size)
