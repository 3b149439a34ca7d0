"""BitPipe: two pipelines in opposite directions, each laid out as a V, so that a device holds four smaller stages.

Source: BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models Training, 2024
(arXiv:2410.19367). Overhead (idle time of the busiest device relative to its working time) of p devices with N
micro-batches, a backward twice as long as a forward; of the published order, of this one with the same memory (2p stage
micro-batches in flight on a device), and with a quarter more:

    p = 4, N = 4    .167   .167   .167     the published (p - 2) / (3 N)
    p = 8, N = 8    .250   .250   .250
    p = 4, N = 16   .104   .042   .031     the last is (p - 2) / (4 N), the least of any order
    p = 8, N = 32   .156   .068   .047
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Schedule
from lightning_gpp.schedules.bidirectional import bidirectional_order
from lightning_gpp.schedules.registry import register_schedule

# A chain of four stages on two devices, two micro-batches. Micro-batch 0 goes to device 1 and back, micro-batch 1 to
# device 0 and back. `2F0` is the forward of stage 2; a backward takes two units.
#
#   time       0   1   2   3   4   5   6   7   8   9   10  11
#   device 0   0F0 1F1 2F1 3F0 3B0---- 2B1---- 1B1---- 0B0----
#   device 1   0F1 1F0 2F0 3F1 3B1---- 2B0---- 1B0---- 0B1----


@register_schedule("bitpipe", layout="zigzag", stages_per_device=2, bidirectional=True)
def bitpipe(plan: Plan, batch_size: int) -> Schedule:
    """The order of Chimera for stages in a zigzag layout."""
    return bidirectional_order(plan, batch_size)
