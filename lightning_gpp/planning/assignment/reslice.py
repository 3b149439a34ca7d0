"""Sequence slicing of a plan: as the settings ask, as an earlier plan was sliced, or not at all."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.rebuild import rebuilt, with_own_step_stage
from lightning_gpp.planning.assignment.slices import Slicing, sequence_length, sliced
from lightning_gpp.slices import is_sliced, unsliced


def slicing_of(plan: Plan) -> Slicing | None:
    """The slicing of a plan; None if it is unsliced."""
    parts = [stage for stage in plan.stages if stage.tokens is not None]
    tokens = sorted({stage.tokens for stage in parts if stage.tokens is not None})
    modules = dict.fromkeys(module for stage in parts for module in stage.modules)
    if not tokens:
        return None
    return Slicing(slices=tuple(stop - start for start, stop in tokens), dim=plan.sequence_dim, modules=tuple(modules))


def unslice(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan without slices. It is rebuilt, as slices keep more than their sums of figures say."""
    return plan if not is_sliced(plan) else rebuilt(unsliced(plan).plan, graph, plan.batch_size)


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

    Sequences of other lengths get as many equal slices, or as many as there are tokens. Stages that cannot be sliced in
    this form stay unsliced.
    """
    try:
        length = sequence_length(graph)
        if isinstance(slicing.slices, int) or sum(slicing.slices) != length:
            slicing = replace(slicing, slices=min(slicing.number, length))
        return plan if slicing.slices == 1 else sliced(plan, graph, slicing)
    except ConfigError:
        return plan
