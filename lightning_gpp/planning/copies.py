"""How many copies of a pipeline, where stages may not have as many replicas as a copy would make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.assignment.estimate import estimate
from lightning_gpp.planning.folding import Cut, is_folded, partition_for
from lightning_gpp.planning.found import Found, partition
from lightning_gpp.planning.problem.answer import Alternative
from lightning_gpp.planning.request import Request
from lightning_gpp.planning.resliced import found_in_slices, in_small_parts
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import simulate

INTERRUPTED: Final = "interrupted"
"""In the notes of an answer: the user wants no further search."""


def partition_copies(name: str, graph: OperatorGraph, request: Request, cut: Cut = partition) -> Found:
    """The plan of the partitioner of that name, with as many copies of the pipeline as are fastest.

    A partitioner itself makes copies by replicas of all stages. Where `request.max_replicas` forbids these, or the
    schedule has a layout of its own, every number of pipelines that divides devices and mini-batch is tried, each with
    its part of the time. `cut` does the searches.

    Raises:
        ConfigError: there is no such partitioner, or the model cannot be cut into slices.
        PlanError: no number of pipelines fits; the message is that for the largest pipeline.
    """
    if request.slicing is None:
        return _whole(name, graph, request, cut)
    parts = in_small_parts(request, request.slicing)
    found = _whole(name, graph, parts, cut)
    if request.batch_size % found.num_pipelines:  # it shares slices of a sample among pipelines
        found = _whole(name, graph, replace(parts, copies=False), cut)
    return found_in_slices(found, graph, request, request.slicing)


def _whole(name: str, graph: OperatorGraph, request: Request, cut: Cut) -> Found:
    """The same for micro-batches that are not cut."""
    devices, whole = request.cluster.num_devices, is_folded(request)
    if not request.copies or (not whole and (request.max_replicas is None or request.max_replicas >= devices)):
        return partition_for(name, graph, request, cut)
    numbers = [n for n in range(1, devices + 1) if devices % n == 0 and request.batch_size % n == 0]
    outcomes = list(_tried(name, graph, request, numbers, cut))
    found = sorted((outcome for outcome in outcomes if isinstance(outcome, Found)), key=lambda entry: entry.seconds)
    if not found:
        raise next(outcome for outcome in outcomes if not isinstance(outcome, Found))
    best, *others = found
    bound = min(entry.answer.lower_bound for entry in found)
    lost = tuple(alternative for entry in others for alternative in _lost(entry, best))
    answer = replace(best.answer, lower_bound=bound, alternatives=(*best.alternatives, *lost))
    return replace(best, answer=answer, search_seconds=sum(entry.search_seconds for entry in found))


def _tried(
    name: str, graph: OperatorGraph, request: Request, numbers: Sequence[int], cut: Cut
) -> Iterator[Found | PlanError | ConfigError]:
    for number in numbers:
        found = None
        try:
            part = replace(
                request,
                cluster=request.cluster.subset(range(request.cluster.num_devices // number)),
                batch_size=request.batch_size // number,
                copies=False,
                seconds=request.seconds / len(numbers),
            )
            found = partition_for(name, graph, part, cut)
            yield _copied(found, graph, request, number)
        except (PlanError, ConfigError) as error:
            yield error
        if found is not None and INTERRUPTED in " ".join(found.answer.notes):
            return


def _copied(found: Found, graph: OperatorGraph, request: Request, number: int) -> Found:
    """The same plan, whose step includes the sums of gradients over all copies."""
    costs = estimate(
        graph,
        found.plan,
        request.cluster,
        request.costs or Roofline(graph),
        footprint=request.footprint,
        num_pipelines=number,
    )
    return replace(found, num_pipelines=number, timeline=simulate(compile_program(found.plan, copies=number), costs))


def _lost(found: Found, best: Found) -> Iterator[Alternative]:
    if found.answer.draft is not None:
        longer = f"{found.seconds / best.seconds - 1:.1%} longer"
        reason = f"with strategy.num_pipelines={found.num_pipelines} the step takes {longer}"
        draft = replace(found.answer.draft, schedule=found.plan.schedule)
        yield Alternative(draft=draft, seconds=found.seconds, reason=reason)
