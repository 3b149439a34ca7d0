"""Rebuild a plan from the modules of its stages: for another graph, unsliced, or with a stage for the user's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.assign import StageDraft, make_plan
from lightning_gpp.planning.assignment.estimate import with_figures_of
from lightning_gpp.slices import unsliced


def rebuilt(plan: Plan, graph: OperatorGraph, batch_size: int, drafts: Sequence[StageDraft] | None = None) -> Plan:
    """Rebuild a plan for another form of the step, or with other stages.

    Edges and sizes are those of the graph, seconds those that the plan has for stages with the same names.
    """
    made = make_plan(graph, drafts or drafts_of(plan), batch_size=batch_size, schedule=plan.schedule, model=plan.model)
    fresh = replace(with_figures_of(plan, made), notes=plan.notes)
    return fresh.chained() if any(edge.artificial for edge in plan.edges) else fresh


def with_own_step_stage(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with the user's step as a stage of its own, behind the modules that were with it."""
    return rebuilt(plan, graph, plan.batch_size, separated(drafts_of(plan)))


def separated(drafts: Sequence[StageDraft], micro_batch_size: int | None = None) -> list[StageDraft]:
    """The drafts with a stage for the user's step alone, with micro-batches of `micro_batch_size` samples if given."""
    result: list[StageDraft] = []
    for draft in drafts:
        if STEP not in draft.modules:
            result.append(draft)
            continue
        rest = tuple(module for module in draft.modules if module != STEP)
        if rest:
            result.append(replace(draft, modules=rest))
        size = micro_batch_size or draft.micro_batch_size
        name = f"{draft.name} step" if rest else draft.name
        result.append(replace(draft, name=name, modules=(STEP,), micro_batch_size=size))
    return result


def drafts_of(plan: Plan) -> list[StageDraft]:
    """Drafts of the plan's stages, unsliced."""
    return [
        StageDraft(
            name=stage.name,
            modules=stage.modules,
            devices=stage.devices,
            micro_batch_size=stage.micro_batch_size,
            round_robin=stage.round_robin,
            recompute=stage.recompute,
        )
        for stage in unsliced(plan).plan.stages
    ]
