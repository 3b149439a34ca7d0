"""The last changes of a plan, however its stages were chosen: recomputation, sharding, the chain baseline, slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan, shared_parameter
from lightning_gpp.planning.assignment.assign import assign
from lightning_gpp.planning.assignment.rebuild import rebuilt, with_own_step_stage
from lightning_gpp.planning.assignment.slices import Slicing, sequence_length, sliced
from lightning_gpp.slices import unsliced


def slicing_of(plan: Plan) -> Slicing | None:
    """The slicing of a plan; None if it is unsliced."""
    parts = [stage for stage in plan.stages if stage.tokens is not None]
    tokens = sorted({stage.tokens for stage in parts if stage.tokens is not None})
    modules = dict.fromkeys(module for stage in parts for module in stage.modules)
    if not tokens:
        return None
    return Slicing(slices=tuple(stop - start for start, stop in tokens), dim=plan.sequence_dim, modules=tuple(modules))


def unslice(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan without slices. It is rebuilt, because figures of slices do not add up to those of unsliced stages."""
    return plan if not plan.is_sliced else rebuilt(unsliced(plan).plan, graph, plan.batch_size)


def slice_plan(plan: Plan, graph: OperatorGraph, slicing: Slicing) -> Plan:
    """The plan with its stages sliced.

    If the user's step keeps a stage from being sliced, it gets a stage of its own.

    Raises:
        ConfigError: see `sliced`.
    """
    last = plan.stages[plan.step_stage]
    rest = tuple(module for module in last.modules if module != STEP)
    if rest:
        apart = sliced(with_own_step_stage(plan, graph), graph, slicing)
        if any(stage.modules == rest and stage.tokens is not None for stage in apart.stages):
            return apart
    return sliced(plan, graph, slicing)


def slice_again(plan: Plan, graph: OperatorGraph, slicing: Slicing) -> Plan:
    """The plan for another form of the mini-batch, sliced as before.

    A sequence of another length gets the same number of equal slices, but at most one per token. Stages that cannot be
    sliced in this form stay unsliced.
    """
    try:
        length = sequence_length(graph)
        if isinstance(slicing.slices, int) or sum(slicing.slices) != length:
            slicing = replace(slicing, slices=min(slicing.number, length))
        return plan if slicing.slices == 1 else sliced(plan, graph, slicing)
    except ConfigError:
        return plan


def completed(
    plan: Plan,
    graph: OperatorGraph,
    *,
    recompute: bool | Sequence[str] | None = None,
    sharding: str = "none",
    chained: bool = False,
    slicing: Slicing | None = None,
) -> Plan:
    """The plan with the settings that do not concern the choice of stages.

    Args:
        plan: stages on devices, perhaps sliced already.
        graph: the operator graph that the plan was made from.
        recompute: stages that run their forward again; None keeps the plan's.
        sharding: what the replicas of a stage split; "none" keeps the plan's.
        chained: run the stages one after the other, even if they do not need each other.
        slicing: how to slice sequences; None keeps the plan's.

    Raises:
        ConfigError, PlanError: the plan does not support a setting.
    """
    slicing = slicing or slicing_of(plan)
    plan = with_recomputed(unslice(plan, graph), recompute)
    if sharding != "none":
        plan = replace(plan, sharding=sharding)
    plan = plan.chained() if chained else plan
    plan = plan if slicing is None else slice_plan(plan, graph, slicing)
    check_sharding(plan, graph)
    return plan


def check_sharding(plan: Plan, graph: OperatorGraph) -> None:
    """Refuse to shard a parameter that several stages use: its ranks would belong to several groups.

    Raises:
        ConfigError: stages are sliced.
        PlanError: names the parameter and the stages.
    """
    if plan.sharding != "fsdp":
        return
    check_sharded_slices(plan.sharding, plan.is_sliced)
    users: dict[str, set[int]] = {}
    assignment = assign(graph, [stage.modules for stage in plan.stages])
    for operator in graph:
        for name in operator.parameters:
            users.setdefault(name, set()).update(assignment[operator.name])
    for name, stages in users.items():
        if len(stages) > 1:
            raise shared_parameter(name, [repr(plan.stages[stage].name) for stage in sorted(stages)])


def check_sharded_slices(sharding: str, is_sliced: bool) -> None:
    """Refuse slices of stages whose parameters are sharded.

    Raises:
        ConfigError: both are wanted.
    """
    if sharding == "fsdp" and is_sliced:
        raise ConfigError(
            "strategy.sharding=fsdp and strategy.slices cannot be combined: each slice would gather its stage's "
            "parameters again. Use strategy.sharding=zero1, or remove strategy.slices."
        )


def with_recomputed(plan: Plan, recompute: bool | Sequence[str] | None) -> Plan:
    """The plan with the given stages recomputed: none (False), all except the one of the user's step (True), or a list.

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
