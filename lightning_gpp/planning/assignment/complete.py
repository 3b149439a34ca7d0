"""The last changes of a plan, whoever chose its stages: recomputation, sharding, the chain baseline, slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.fit import check_sharding
from lightning_gpp.planning.assignment.reslice import slice_plan, slicing_of, unslice
from lightning_gpp.planning.assignment.slices import Slicing


def completed(
    plan: Plan,
    graph: OperatorGraph,
    *,
    recompute: bool | Sequence[str] | None = None,
    sharding: str = "none",
    chained: bool = False,
    slicing: Slicing | None = None,
) -> Plan:
    """The plan with what the settings say besides its stages.

    Args:
        plan: stages on devices, perhaps sliced already.
        graph: what the plan was made from.
        recompute: stages that run their forward again; None leaves it to the plan.
        sharding: what the replicas of a stage split; "none" leaves it to the plan.
        chained: run the stages one after the other, even if they do not need each other.
        slicing: how to slice sequences; None leaves it to the plan.

    Raises:
        ConfigError, PlanError: the plan cannot have it.
    """
    slicing = slicing or slicing_of(plan)
    plan = with_recomputed(unslice(plan, graph), recompute)
    if sharding != "none":
        plan = replace(plan, sharding=sharding)
    plan = plan.chained() if chained else plan
    plan = plan if slicing is None else slice_plan(plan, graph, slicing)
    check_sharding(plan, graph)
    return plan


def with_recomputed(plan: Plan, recompute: bool | Sequence[str] | None) -> Plan:
    """The plan with these stages recomputed: none (False), all but the step's (True), or those listed.

    None leaves the plan as it is.

    Raises:
        ConfigError: a listed stage does not exist, or runs the step.
    """
    if recompute is None:
        return plan
    step = plan.stages[plan.step_stage].name
    others = [stage.name for stage in plan.stages if stage.name != step]
    wanted = (others if recompute else []) if isinstance(recompute, bool) else recompute
    unknown = sorted(set(wanted) - {step, *others})
    if unknown:
        raise ConfigError(f"strategy.recompute lists {unknown}; the stages that can be recomputed are {others}.")
    if step in wanted:
        raise ConfigError(
            f"strategy.recompute lists stage {step!r}, which runs the training step: it would log and count twice. "
            f"Leave it out, or give {STEP!r} a stage of its own (strategy.stages); others: {others}."
        )
    return replace(plan, stages=tuple(replace(stage, recompute=stage.name in wanted) for stage in plan.stages))


def with_batch_size(plan: Plan, batch_size: int) -> Plan:
    """The plan for a smaller mini-batch, which limits the sizes of micro-batches."""
    stages = (replace(stage, micro_batch_size=min(stage.micro_batch_size, batch_size)) for stage in plan.stages)
    return replace(plan, batch_size=batch_size, stages=tuple(stages))
