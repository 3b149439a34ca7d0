"""LayerPipe: weight gradients are tasks of their own, and forwards are far ahead of backwards.

Source: Unnikrishnan and Parhi, LayerPipe: Accelerating Deep Neural Network Training by Intra-Layer and Inter-Layer
Gradient Pipelining and Multiprocessor Scheduling, ICCAD 2021 (arXiv 2108.06629). There, input and weight gradients of a
layer are independent tasks of a multiprocessor schedule, and its forward and backward are two micro-batches apart per
layer that follows, so gradients are delayed. That is this schedule without a flush: the delay of a stage is twice the
number of stages that follow (LayerPipe2, arXiv 2512.08160), and nobody waits for messages that take at most half a
micro-batch's work. With a flush it keeps both ideas as far as results allow. It moves no tasks to neighbours, because
parameters stay on their stage's devices.
"""

from __future__ import annotations

from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.bubble_filling import Preference, fill, forwards_ahead
from lightning_gpp.schedules.device_orders import Orders
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import work_of
from lightning_gpp.schedules.zb_h1 import split_orders

DISTANCE: Final = 2
"""Micro-batches between forward and backward per stage that follows."""

# A chain of three stages, five micro-batches, each action one unit. The last stage never waits for gradients and leaves
# all its W to the end.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16
#   stage 0  F0  F1  F2  F3  F4  I0  W0  I1  W1  I2  W2  I3  W3  I4  W4
#   stage 1      F0  F1  F2  I0  F3  I1  F4  I2  W0  I3  W1  I4  W2  W3  W4
#   stage 2          F0  I0  F1  I1  F2  I2  F3  I3  F4  I4  W0  W1  W2  W3  W4


@register_schedule("layerpipe")
def layerpipe(plan: Plan, batch_size: int) -> Orders:
    """A multiprocessor schedule: each device prefers input gradients, then forwards, and never idles while W is left.

    A stage of depth d has up to 2d - 1 micro-batches between forward and input gradients, and exactly as many where the
    pipeline does not flush: then devices alternate, as they have nothing to choose. Loads balance because the
    busiest devices leave their W to the end of the step. The memory limit is `plan.memory_bytes`; if that is unknown,
    twice the peak of the neediest device under 1F1B.
    """
    if plan.period:
        return split_orders(plan, batch_size, DISTANCE)
    return fill(work_of(plan, batch_size), [Preference(ahead=forwards_ahead(plan, DISTANCE))], share=DISTANCE)
