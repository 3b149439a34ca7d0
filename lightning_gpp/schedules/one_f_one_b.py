"""1F1B on a DAG of stages: each stage alternates backward and forward after a warm-up given by its depth.

Plans with sliced stages have an order of their own (`seq_1f1b`).

Sources: PipeDream (Narayanan et al., SOSP 2019) for the alternation on a chain; GraphPipe (Jeon et al., ASPLOS 2025,
section 6) for warm-up by depth and for micro-batch sizes that differ between stages. GraphPipe prints its rule as an
image; the rule below was reconstructed from the figures in its text and from the authors' strategy files.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.alternating import alternating
from lightning_gpp.schedules.deadlock_free import without_deadlock
from lightning_gpp.schedules.device_orders import StageOrders
from lightning_gpp.schedules.registry import register_schedule
from lightning_gpp.schedules.seq_1f1b import in_slices
from lightning_gpp.schedules.warm_up import in_flight_samples
from lightning_gpp.slices import is_sliced

# Two branches, 0 -> 1 and 2, that join in 3; four micro-batches; each stage on its own device. The warm-ups are the
# depths 3, 2, 2, 1. The short branch can start when the long one reaches the join, so it holds one micro-batch less.
#
#   time      0   1   2   3   4   5   6   7   8   9  10  11
#   stage 0  F0  F1  F2          B0  F3  B1      B2      B3
#   stage 1      F0  F1      B0  F2  B1  F3  B2      B3
#   stage 2  F0  F1          B0  F2  B1  F3  B2      B3
#   stage 3          F0  B0  F1  B1  F2  B2  F3  B3


@register_schedule("1f1b")
def one_f_one_b(plan: Plan, batch_size: int) -> StageOrders:
    """Warm-up forwards, then one backward and one forward in turn, then the remaining backwards, on every stage."""
    if is_sliced(plan):
        return in_slices(plan, batch_size)
    counts = warm_up(plan, batch_size)
    return {stage: _order(stage, count, len(plan.intervals(stage, batch_size))) for stage, count in counts.items()}


def _order(stage: int, warm_up: int, number: int) -> tuple[Action, ...]:
    forwards, backwards = ([Action(stage, kind, i) for i in range(number)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    return alternating(forwards, backwards, warm_up)


def warm_up(plan: Plan, batch_size: int) -> dict[int, int]:
    """For every stage the forwards before its first backward; also its maximum of micro-batches in flight."""
    counts = {}
    for stage, samples in in_flight_samples(plan).items():
        wanted = samples // plan.stages[stage].micro_batch_size
        counts[stage] = min(wanted, len(plan.intervals(stage, batch_size)))
    return without_deadlock(plan, batch_size, counts)
