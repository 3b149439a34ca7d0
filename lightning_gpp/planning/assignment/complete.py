"""The last changes of a plan, however its stages were chosen: recomputation, offload, sharding, the chain baseline,
slices, another form of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.errors import ConfigError, MicroBatchesError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan, Stage, shared_parameter
from lightning_gpp.planning.assignment.assign import Assignment, assign, make_plan
from lightning_gpp.planning.assignment.estimate import with_figures_of
from lightning_gpp.planning.assignment.modules import recomputed_blocks
from lightning_gpp.planning.assignment.slices import Slicing, sequence_length, sliced
from lightning_gpp.slices import unsliced
from lightning_gpp.wording import counted


def slicing_of(plan: Plan) -> Slicing | None:
    """The slicing of a plan; None if it is unsliced."""
    parts = [stage for stage in plan.stages if stage.tokens is not None]
    tokens = sorted({stage.tokens for stage in parts if stage.tokens is not None})
    modules = dict.fromkeys(module for stage in parts for module in stage.modules)
    if not tokens:
        return None
    return Slicing(slices=tuple(stop - start for start, stop in tokens), modules=tuple(modules))


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
    offload: bool | Sequence[str] | None = None,
    sharding: str = "none",
    chained: bool = False,
    slicing: Slicing | None = None,
) -> Plan:
    """The plan with the settings that do not concern the choice of stages.

    Args:
        plan: stages on devices, perhaps sliced already.
        graph: the operator graph that the plan was made from.
        recompute: stages or blocks that run their forward again; None keeps the plan's.
        offload: stages that keep activations in host memory; None keeps the plan's.
        sharding: what the replicas of a stage split; "none" and "auto" keep the plan's.
        chained: run the stages one after the other, even if they do not need each other.
        slicing: how to slice sequences; None keeps the plan's.

    Raises:
        ConfigError, PlanError: the plan does not support a setting.
    """
    slicing = slicing or slicing_of(plan)
    plan = with_offloaded(with_recomputed(unslice(plan, graph), graph, recompute), graph, offload)
    if sharding not in ("none", "auto"):
        plan = replace(plan, sharding=sharding)
    plan = plan.chained() if chained else plan
    if slicing is not None:
        _check_slicing(plan)
        plan = slice_plan(plan, graph, slicing)
    check_sharding(plan, graph)
    return plan


def _check_slicing(plan: Plan) -> None:
    """Refuse blocks that would run again outside of their slice, without what earlier tokens carry, and offload."""
    blocks = [stage.name for stage in plan.stages if stage.recomputed_blocks]
    offloaded = [stage.name for stage in plan.stages if stage.offload]
    for names, what in ((blocks, "recomputed blocks"), (offloaded, "offload")):
        if names:
            raise ConfigError(
                f"strategy.slices cannot be combined with {what}, which the stages {names} have. Recompute whole "
                "stages: strategy.recompute=true."
            )


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
            "parameters again. Use strategy.sharding=zero1."
        )


def with_recomputed(plan: Plan, graph: OperatorGraph, recompute: bool | Sequence[str] | None) -> Plan:
    """The plan with the given stages or blocks recomputed, and its figures.

    Args:
        plan: an unsliced plan.
        graph: the operator graph that it was made from.
        recompute: no stage (False), all except the one of the user's step (True), or names of stages, and paths of
            modules as blocks; None leaves the plan's.

    Raises:
        ConfigError: an entry is neither a stage nor a module with operators, or is the stage that runs the step.
    """
    if recompute is None:
        return plan
    return rebuilt(plan, graph, plan.batch_size, _recomputing(plan, graph, recompute))


def with_offloaded(plan: Plan, graph: OperatorGraph, offload: bool | Sequence[str] | None) -> Plan:
    """The plan with the given stages offloaded, and its figures.

    Args:
        plan: an unsliced plan.
        graph: the operator graph that it was made from.
        offload: no stage (False), all except the one of the user's step (True), or names of stages; None leaves the
            plan's.

    Raises:
        ConfigError: an entry is not a stage.
        PlanError: a stage is recomputed as a whole.
    """
    if offload is None:
        return plan
    names = [stage.name for stage in plan.stages]
    wanted = [name for name in names if name != names[plan.step_stage]] if offload is True else offload or []
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise ConfigError(f"strategy.offload lists {unknown}; the stages of the plan are {names}.")
    stages = [replace(stage, offload=stage.name in wanted) for stage in plan.stages]
    return rebuilt(plan, graph, plan.batch_size, stages)


def _recomputing(plan: Plan, graph: OperatorGraph, recompute: bool | Sequence[str]) -> tuple[Stage, ...]:
    assignment = assign(graph, [stage.modules for stage in plan.stages])
    step = plan.stages[plan.step_stage].name
    others = [stage.name for stage in plan.stages if stage.name != step]
    wanted = (others if recompute else []) if isinstance(recompute, bool) else recompute
    if step in wanted:
        raise ConfigError(
            f"strategy.recompute lists stage {step!r}, which runs the training step: it would log and count twice. "
            f"List others: {others}."
        )
    paths = [entry for entry in wanted if entry not in others]
    found = [_inside(graph, assignment, index, paths) for index in range(len(plan.stages))]
    unknown = sorted(set(paths).difference(*found))
    if unknown:
        raise ConfigError(
            f"strategy.recompute lists {unknown}; the stages that can be recomputed are {others}, and blocks of stages "
            "are written as paths of modules."
        )
    pairs = zip(plan.stages, found, strict=True)
    return tuple(replace(stage, recompute=stage.name in wanted or blocks or False) for stage, blocks in pairs)


def _inside(graph: OperatorGraph, assignment: Assignment, stage: int, paths: Sequence[str]) -> tuple[str, ...]:
    """Those of the paths in which the stage has blocks."""
    mine = {name for name, stages in assignment.items() if stage in stages}
    return tuple(path for path in paths if recomputed_blocks(graph, mine, [path]))


def check_blocks(plan: Plan, graph: OperatorGraph) -> None:
    """Refuse a user's plan whose stages are to recompute what they do not call.

    Raises:
        ConfigError: names the stage and the paths.
    """
    if not any(stage.recomputed_blocks for stage in plan.stages):
        return
    plan = unslice(plan, graph)
    assignment = assign(graph, [stage.modules for stage in plan.stages])
    for index, stage in enumerate(plan.stages):
        wanted = stage.recomputed_blocks
        missing = sorted(set(wanted) - set(_inside(graph, assignment, index, wanted)))
        if missing:
            raise ConfigError(
                f"Stage {stage.name!r} is to recompute {missing}, but calls no such modules as a whole. List modules "
                "of the stage."
            )


def with_batch_size(plan: Plan, batch_size: int) -> Plan:
    """The plan for a smaller mini-batch, which limits the sizes of micro-batches."""
    stages = (replace(stage, micro_batch_size=min(stage.micro_batch_size, batch_size)) for stage in plan.stages)
    return replace(plan, batch_size=batch_size, stages=tuple(stages))


def rebuilt(plan: Plan, graph: OperatorGraph, batch_size: int, stages: Sequence[Stage] | None = None) -> Plan:
    """Rebuild a plan for another form of the step, or with other stages.

    Edges and sizes come from the graph, seconds from the plan's stages with the same names.
    """
    stages = stages or unsliced(plan).plan.stages
    made = make_plan(graph, stages, batch_size=batch_size, schedule=plan.schedule, model=plan.model, unused=plan.unused)
    fresh = replace(with_figures_of(plan, made), notes=plan.notes)
    return fresh.chained() if any(edge.artificial for edge in plan.edges) else fresh


def with_own_step_stage(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with the user's step as a stage of its own, after the stage that it was part of."""
    return rebuilt(plan, graph, plan.batch_size, separated(unsliced(plan).plan.stages))


def separated(stages: Sequence[Stage], micro_batch_size: int | None = None) -> list[Stage]:
    """The stages, with one for the user's step alone, with micro-batches of `micro_batch_size` samples if given."""
    result: list[Stage] = []
    for stage in stages:
        if STEP not in stage.modules:
            result.append(stage)
            continue
        rest = tuple(module for module in stage.modules if module != STEP)
        if rest:
            result.append(replace(stage, modules=rest))
        size = micro_batch_size or stage.micro_batch_size
        name = f"{stage.name} step" if rest else stage.name
        result.append(replace(stage, name=name, modules=(STEP,), micro_batch_size=size))
    return result


# -- samples of a micro-batch -----------------------------------------------------------------------------------------


def resolve_size(batch_size: int, num_micro_batches: int | None, micro_batch_size: int | None, default: int) -> int:
    """Samples of a micro-batch.

    Args:
        batch_size: samples of the mini-batch of one pipeline replica.
        num_micro_batches: the user's, or None.
        micro_batch_size: the user's, or None.
        default: number of micro-batches if the user gave neither, limited to one per sample.

    Raises:
        ConfigError: both are given, or the mini-batch cannot be cut into these micro-batches.
    """
    check_one_given(num_micro_batches, micro_batch_size)
    if micro_batch_size is not None:
        return _checked_size(batch_size, micro_batch_size)
    if num_micro_batches is not None:
        return _size_of(batch_size, num_micro_batches)
    return -(-batch_size // min(max(1, default), batch_size))


def check_one_given(num_micro_batches: int | None, micro_batch_size: int | None) -> None:
    """Refuse both a number and a size of micro-batches.

    Raises:
        ConfigError: both are given.
    """
    if num_micro_batches is not None and micro_batch_size is not None:
        raise ConfigError(
            f"Both strategy.num_micro_batches={num_micro_batches} and strategy.micro_batch_size={micro_batch_size} are "
            "given, but each follows from the other; give one."
        )


def _checked_size(batch_size: int, size: int) -> int:
    if not 1 <= size <= batch_size:
        raise MicroBatchesError(
            f"strategy.micro_batch_size={size}, but a mini-batch has {counted(batch_size, 'sample')} per pipeline; "
            f"choose a size from 1 to {batch_size}."
        )
    return size


def _size_of(batch_size: int, count: int) -> int:
    if count < 1:
        raise ConfigError(f"strategy.num_micro_batches={count}; it must be a whole number >= 1.")
    if count > batch_size:
        raise MicroBatchesError(
            f"More micro-batches than samples: strategy.num_micro_batches={count}, but a mini-batch has "
            f"{counted(batch_size, 'sample')} per pipeline. Set strategy.num_micro_batches to at most {batch_size}, or "
            "enlarge the batch."
        )
    size = -(-batch_size // count)
    if -(-batch_size // size) != count:
        raise MicroBatchesError(
            f"strategy.num_micro_batches={count}: {batch_size} samples do not give {count} micro-batches of one size "
            f"(the last may be smaller); {size} samples each give {-(-batch_size // size)}. Set "
            f"strategy.num_micro_batches={-(-batch_size // size)}."
        )
    return size
