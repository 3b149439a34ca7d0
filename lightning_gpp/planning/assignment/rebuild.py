"""A plan's stages drawn up again: for another graph, put together, or with the user's step as a stage of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.assign import StageDraft, make_plan
from lightning_gpp.planning.assignment.timed import with_figures_of
from lightning_gpp.slices import unsliced


def remade(plan: Plan, graph: OperatorGraph, batch_size: int, drafts: Sequence[StageDraft] | None = None) -> Plan:
    """The stages of a plan for another form of the step, or other stages: with edges and sizes of the graph, and the
    seconds that the plan knows of stages with the same names."""
    made = make_plan(graph, drafts or drafts_of(plan), batch_size=batch_size, schedule=plan.schedule, model=plan.model)
    fresh = replace(with_figures_of(plan, made), notes=plan.notes)
    return fresh.chained() if any(edge.artificial for edge in plan.edges) else fresh


def step_apart(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with the user's step as a stage of its own, behind the modules that were with it."""
    return remade(plan, graph, plan.batch_size, separated(drafts_of(plan)))


def separated(drafts: Sequence[StageDraft], micro_batch_size: int | None = None) -> list[StageDraft]:
    """The user's step as a stage of its own, with micro-batches of its own size if it is given."""
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
    """The plan's stages, slices put together, before their edges and figures are known."""
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
