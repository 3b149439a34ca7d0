"""GPipe: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019)."""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.registry import register_schedule

# Two branches, 0 and 1, that join in 2; four micro-batches; each stage on its own device. The branches run in parallel.
#
#   time      0   1   2   3   4   5   6   7   8   9
#   stage 0  F0  F1  F2  F3          B0  B1  B2  B3
#   stage 1  F0  F1  F2  F3          B0  B1  B2  B3
#   stage 2      F0  F1  F2  F3  B0  B1  B2  B3


@register_schedule("gpipe")
def gpipe(plan: Plan, batch_size: int) -> StageOrders:
    """All forwards, then all backwards, on every stage. Every micro-batch stays in flight.

    Backwards run in the order of the forwards, so that gradients add up as in a loop over the micro-batches.
    """
    return {stage: _order(stage, len(plan.intervals(stage, batch_size))) for stage in range(len(plan.stages))}


def _order(stage: int, number: int) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in range(number))
