"""Rebuilds a plan from the modules of its stages: for another graph, unsliced, or with a stage for the user's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.assignment.estimate import with_figures_of
from lightning_gpp.slices import unsliced


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
