"""Slices of a run's plan: cut as the settings say, or as a given plan is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assign import StageDraft, make_plan
from lightning_gpp.planning.slicing import Slicing, sequence_length, sliced
from lightning_gpp.planning.timed import with_figures_of
from lightning_gpp.slices import unsliced


def slicing_from(slices: Any, dim: Any, modules: Any) -> Slicing | None:
    """What `strategy.slices`, `slice_dim` and `slice_modules` ask for; None for micro-batches that stay whole.

    Raises:
        ConfigError: a value is wrong.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise ConfigError(
            f"strategy.slice_dim is {dim!r}; it must be a whole number >= 1: dimension 0 counts the samples."
        )
    if modules is not None and (isinstance(modules, str) or not all(isinstance(name, str) for name in modules)):
        raise ConfigError(f"strategy.slice_modules is {modules!r}; it must be a list of paths of modules, or null.")
    if slices is None:
        if modules is not None:
            raise ConfigError("strategy.slice_modules is given without strategy.slices, which says into how many.")
        return None
    listed = isinstance(slices, Sequence) and not isinstance(slices, str)
    numbers = list(slices) if listed else [slices]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise ConfigError(
            f"strategy.slices is {slices!r}; it must be a whole number >= 1, or the tokens of each slice as a list."
        )
    if numbers == [1] or (listed and len(numbers) == 1):
        return None
    return Slicing(
        slices=tuple(numbers) if listed else slices, dim=dim, modules=None if modules is None else tuple(modules)
    )


def slicing_of(plan: Plan) -> Slicing | None:
    """How a plan is cut; None if it is not."""
    parts = [stage for stage in plan.stages if stage.tokens is not None]
    tokens = sorted({stage.tokens for stage in parts if stage.tokens is not None})
    modules = dict.fromkeys(module for stage in parts for module in stage.modules)
    if not tokens:
        return None
    return Slicing(slices=tuple(stop - start for start, stop in tokens), dim=plan.sequence_dim, modules=tuple(modules))


def in_slices(plan: Plan, graph: OperatorGraph, slicing: Slicing) -> Plan:
    """The plan cut; where the user's step keeps a stage whole that could be cut, the step gets a stage of its own.

    Raises:
        ConfigError: see `sliced`.
    """
    last = plan.stages[plan.step_stage]
    rest = tuple(module for module in last.modules if module != STEP)
    if rest:
        apart = sliced(step_apart(plan, graph), graph, slicing)
        if any(stage.modules == rest and stage.tokens is not None for stage in apart.stages):
            return apart
    return sliced(plan, graph, slicing)


def again(plan: Plan, graph: OperatorGraph, slicing: Slicing) -> Plan:
    """The plan of another form of the mini-batch, cut as it was; sequences of other lengths into equal slices."""
    lengths = slicing.slices
    if not isinstance(lengths, int) and sum(lengths) != sequence_length(graph):
        slicing = replace(slicing, slices=len(lengths))
    return sliced(plan, graph, slicing)


def step_apart(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with the user's step as a stage of its own, behind the modules that were with it."""
    drafts = separated(drafts_of(plan))
    apart = make_plan(graph, drafts, batch_size=plan.batch_size, schedule=plan.schedule, model=plan.model)
    apart = replace(with_figures_of(plan, apart), notes=plan.notes)
    return apart.chained() if any(edge.artificial for edge in plan.edges) else apart


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
