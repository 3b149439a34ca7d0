"""Your own schedule: GPipe with its backwards in reverse, so that the newest activations come first.

    import gpp_examples.own_schedule
    trainer = L.Trainer(strategy=GPPStrategy(schedule="last_first"), ...)

On the command line, import it in the module of your LightningModule, and set `strategy.schedule=last_first`.
"""

from __future__ import annotations

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, register_schedule

# Two stages in a chain, three micro-batches.
#
#   time      0   1   2   3   4   5   6   7
#   stage 0  F0  F1  F2      B2  B1  B0
#   stage 1      F0  F1  F2  B2  B1  B0


@register_schedule("last_first")
def last_first(plan: Plan, batch_size: int) -> dict[int, tuple[Action, ...]]:
    """The order of every stage's forwards and backwards; a common pass interleaves several stages of a device."""
    return {stage: _order(stage, len(plan.intervals(stage, batch_size))) for stage in range(len(plan.stages))}


def _order(stage: int, number: int) -> tuple[Action, ...]:
    forwards = [Action(stage, Kind.FORWARD, index) for index in range(number)]
    backwards = [Action(stage, Kind.BACKWARD, index) for index in reversed(range(number))]
    return (*forwards, *backwards)
