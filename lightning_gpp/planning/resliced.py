"""Plans cut along the sequence as the user wants, as another plan is, or as a partitioner's should be."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.rebuild import remade, step_apart
from lightning_gpp.planning.assignment.slices import Slicing, sequence_length, sliced
from lightning_gpp.planning.folding import scheduled
from lightning_gpp.planning.found import Found
from lightning_gpp.planning.request import Request
from lightning_gpp.slices import is_sliced, unsliced


def slicing_of(plan: Plan) -> Slicing | None:
    """How a plan is cut; None if it is not."""
    parts = [stage for stage in plan.stages if stage.tokens is not None]
    tokens = sorted({stage.tokens for stage in parts if stage.tokens is not None})
    modules = dict.fromkeys(module for stage in parts for module in stage.modules)
    if not tokens:
        return None
    return Slicing(slices=tuple(stop - start for start, stop in tokens), dim=plan.sequence_dim, modules=tuple(modules))


def put_together(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan without slices. What slices keep in addition is not in the sums of their figures: they are made anew."""
    return plan if not is_sliced(plan) else remade(unsliced(plan).plan, graph, plan.batch_size)


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
    """The plan of another form of the mini-batch, cut as it was; sequences of other lengths into as many equal slices,
    or as many as there are tokens. What cannot be cut in this form stays whole."""
    try:
        length = sequence_length(graph)
        if isinstance(slicing.slices, int) or sum(slicing.slices) != length:
            slicing = replace(slicing, slices=min(slicing.number, length))
        return plan if slicing.slices == 1 else sliced(plan, graph, slicing)
    except ConfigError:
        return plan


def in_small_parts(request: Request, slicing: Slicing) -> Request:
    """The request as a partitioner takes it, which knows no slices: with as many micro-batches as there will be slices
    of all, so that it balances stages for a long pipeline.

    Under 1F1B slices hold no more than as many micro-batches. GPipe holds all, so its micro-batches stay as they are.
    """
    if request.schedules == ("gpipe",):
        return request
    number = request.num_micro_batches
    return replace(
        request,
        batch_size=request.batch_size * slicing.number,
        num_micro_batches=None if number is None else number * slicing.number,
    )


def found_in_slices(found: Found, graph: OperatorGraph, request: Request, slicing: Slicing) -> Found:
    """What was found for `in_small_parts`, cut, for the mini-batch that there is. No bound is known for slices.

    Args:
        found: by a search for the small parts.
        graph: of the model.
        request: the real one.
        slicing: how to cut.
    """
    scale = in_small_parts(request, slicing).batch_size // request.batch_size
    size = found.plan.batch_size // scale
    stages = tuple(replace(stage, micro_batch_size=min(stage.micro_batch_size, size)) for stage in found.plan.stages)
    plan = in_slices(replace(found.plan, batch_size=size, stages=stages), graph, slicing)
    alternatives = tuple(replace(entry, seconds=entry.seconds / scale) for entry in found.answer.alternatives)
    answer = replace(found.answer, objective=found.answer.objective / scale, lower_bound=0.0, alternatives=alternatives)
    return scheduled(replace(found, answer=answer), plan, graph, request)
