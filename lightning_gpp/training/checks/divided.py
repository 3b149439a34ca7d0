"""Plans for mini-batches whose micro-batches have sizes of their own."""

from __future__ import annotations

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import Plan


def check_divided(plan: Plan) -> None:
    """Refuse stages that would cut these micro-batches further.

    Raises:
        PlanError: names the stage.
    """
    size = plan.stages[plan.step_stage].micro_batch_size
    for stage in plan.stages:
        if len(stage.devices) > 1 or stage.micro_batch_size != size:
            raise PlanError(
                f"Stage {stage.name!r} has {len(stage.devices)} replicas and micro-batches of {stage.micro_batch_size} "
                f"samples (the step: {size}). With strategy.micro_batch_by or strategy.batch_rows all stages take the "
                "same micro-batches, undivided: give every stage one device and no micro_batch_size, and use "
                "strategy.num_pipelines for data parallelism."
            )
