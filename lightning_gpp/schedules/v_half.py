"""V-Half: a V of two stages per device with about half the memory of 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.building_blocks import BuildingBlock, compacted_blocks
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.v_min import V_MIN

V_HALF: Final = BuildingBlock(forward=(2, 1), backward=(1, 2), gaps=(0, 3))
"""2 + 1 cells per stage either way: 3/6 of the memory of 1F1B, and p/2 + 1 micro-batches with p devices."""

# The block of three devices; capital letters are stages 0 to 2, small ones stages 5 to 3.
#
#   cell       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16
#   device 0   F                           f   i                               I
#   device 1           F               f               i                   I
#   device 2                   F   f                           i       I


@register_schedule("v_half", layout="zigzag", stages_per_device=2)
def v_half(plan: Plan, batch_size: int) -> Schedule:
    """The compacted block; V-Min if it does not fit `plan.memory_bytes`."""
    return compacted_blocks(plan, batch_size, (V_HALF, V_MIN))
