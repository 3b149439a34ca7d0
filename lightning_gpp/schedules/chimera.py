"""Chimera: two pipelines through the same devices in opposite directions.

Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines, SC'21
(arXiv:2107.06925). The bubble of D devices, D even, in units of a forward:

    backward as long as a forward      D - 2       for N = D, 2D, 3D ... micro-batches: the published ratio
                                                   (D - 2) / (2N + D - 2)
    backward twice as long             2 (D - 2)   for the same N; no order has less for N = D
    the same, with memory for 3/2 as   3 (D/2 - 1) for N = 2D, 3D ...: the published ratio again, and the least of any
    many micro-batches                             order, as the devices in the middle cannot start or end earlier

A device keeps D/2 + 1 to D micro-batches in flight, or up to 3D/2 - 1 in the last case. The paper's unit of D
micro-batches, repeated N/D times, has (N/D + 1) (D - 2) in the second case.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.bidirectional import bidirectional_order
from lightning_gpp.schedules.registry import register_schedule

# A chain of four stages, four micro-batches. Even ones run from device 0 to device 3, odd ones (') from 3 to 0, so
# device 0 holds stage 0 of the even ones and stage 3 of the odd ones. A backward takes two units.
#
#   time       0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15
#   device 0   F0  F2      F1' B1'---- F3' B3'----     B0-----         B2-----
#   device 1       F0  F1' F2  F3'     B1'---- B0----- B3'---- B2-----
#   device 2       F1' F0  F3' F2      B0----- B1'---- B2----- B3'----
#   device 3   F1' F3'     F0  B0----- F2  B2-----     B1'----         B3'----


@register_schedule("chimera", bidirectional=True)
def chimera(plan: Plan, batch_size: int) -> Schedule:
    """Forwards and backwards of both pipelines, so that each fills the gaps of the other."""
    return bidirectional_order(plan, batch_size)
