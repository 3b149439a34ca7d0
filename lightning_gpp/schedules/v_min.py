"""V-Min: a V of two stages per device with about a third of the memory of 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.building_blocks import BuildingBlock, compacted_blocks
from lightning_gpp.schedules.registry import register_schedule

V_MIN: Final = BuildingBlock(forward=(1, 1), backward=(1, 1), gaps=(0, 2, 4))
"""1 + 1 cells per stage either way: 2/6 of the memory of 1F1B, and (p + 4) // 3 micro-batches with p devices."""

# The block of two devices; capital letters are stages 0 and 1, small ones stages 3 and 2.
#
#   cell       0   1   2   3   4   5   6   7
#   device 0   F           f   i           I
#   device 1       F   f           i   I


@register_schedule("v_min", layout="zigzag", stages_per_device=2)
def v_min(plan: Plan, batch_size: int) -> Schedule:
    """The compacted block. It needs the least memory of all V schedules, and suffers most from uneven times."""
    return compacted_blocks(plan, batch_size, (V_MIN,))
