"""ZB-H1: the order and the memory of 1F1B, with weight gradients that fill most of its bubble.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.one_f_one_b import (
    action_samples,
    alternating,
    lane_actions,
    lane_orders,
    lanes,
    samples_ahead,
)
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.work import unsplit_stages

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


def split_orders(plan: Plan, batch_size: int, lead: int) -> StageOrders:
    """The order of every stage: I, W and F in turn after the warm-up, with W delayed as far as memory allows.

    In a chain, a stage of depth d has a warm-up of 1 + lead (d - 1) micro-batches, and its W follows its I by the
    difference to the longest warm-up. So every stage holds the same number of micro-batches, some of them for W only.
    With several micro-batch sizes, samples are counted instead. Stages without weight gradients have full backwards.

    All n slices of a stage have one order, which counts slices: the warm-up is n + lead (d - 1).
    """
    unsplit, samples = unsplit_stages(plan), samples_ahead(plan, lead)
    late = [int(max(samples) - held) // size for held, size in zip(samples, action_samples(plan), strict=True)]
    lateness = dict(zip(lanes(plan), late, strict=True))

    def lane(members: Sequence[int], warm_up: int) -> tuple[Action, ...]:
        kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        forwards, inputs, weights = (lane_actions(plan, members, kind, batch_size) for kind in kinds)
        order = alternating(forwards, inputs, warm_up, weights, lateness[members[0]])
        return order if members[0] not in unsplit else _joined(order)

    return lane_orders(plan, batch_size, lead, lane)


def _joined(order: Sequence[Action]) -> tuple[Action, ...]:
    """The order with full backwards in place of input gradients."""
    kept = (action for action in order if action.kind is not Kind.WEIGHT)
    return tuple(action.of_kind(Kind.BACKWARD) if action.kind is Kind.INPUT else action for action in kept)
