"""Schedules side by side, each with the plan that it wants; and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_gpp.errors import GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.copies import partition_copies
from lightning_gpp.planning.folding import num_stages_per_device
from lightning_gpp.planning.found import Found, partition
from lightning_gpp.planning.problem.answer import Alternative
from lightning_gpp.planning.request import Request

Outcome = Found | GPPError
"""A plan, or why there is none."""


def best_schedule(name: str, graph: OperatorGraph, request: Request) -> Found:
    """The fastest of `request.schedules` that fits the memory, with its plan.

    Raises:
        ConfigError: there is no such partitioner.
        PlanError: there is no plan for any of them; the message is that for the first.
    """
    outcomes = [outcome for _, outcome in each_schedule(name, graph, request)]
    found = [outcome for outcome in outcomes if isinstance(outcome, Found)]
    if not found:
        raise next(outcome for outcome in outcomes if isinstance(outcome, GPPError))
    best = max(found, key=lambda entry: (entry.fits, entry.samples_per_second))
    lost = tuple(alternative for entry in found if entry is not best for alternative in _lost(entry, best))
    bound = min(entry.answer.lower_bound for entry in found)
    answer = replace(best.answer, lower_bound=bound, alternatives=(*lost, *best.answer.alternatives))
    return replace(best, answer=answer, search_seconds=sum({entry.search_seconds for entry in found}))


def each_schedule(name: str, graph: OperatorGraph, request: Request) -> Iterator[tuple[str, Outcome]]:
    """What every one of `request.schedules` comes to, in their order. One search serves all that want the same stages.

    Yields:
        The schedule's name, and its plan or why it has none.
    """
    requests = [replace(request, schedules=(schedule,)) for schedule in request.schedules]
    seconds = request.seconds / len({num_stages_per_device(part) for part in requests})
    cut = _once(partition)
    for part in requests:
        try:
            outcome: Outcome = partition_copies(name, graph, replace(part, seconds=seconds), cut)
        except GPPError as error:
            outcome = error
        yield part.schedules[0], outcome


def _once(cut: Callable[[str, OperatorGraph, Request], Found]) -> Callable[[str, OperatorGraph, Request], Found]:
    """The same function, which does not do the same search twice."""
    known: dict[object, Outcome] = {}

    def search(name: str, graph: OperatorGraph, request: Request) -> Found:
        key = (request.cluster, request.batch_size, request.schedules, request.max_replicas, request.copies)
        if key not in known:
            try:
                known[key] = cut(name, graph, request)
            except GPPError as error:
                known[key] = error
        outcome = known[key]
        if isinstance(outcome, GPPError):
            raise outcome
        return outcome

    return search


def _lost(found: Found, best: Found) -> Iterator[Alternative]:
    if found.answer.draft is None:
        return
    draft = replace(found.answer.draft, schedule=found.plan.schedule)
    slower = best.samples_per_second / found.samples_per_second - 1
    reason = f"as {found.plan.schedule} the step takes {slower:.1%} longer" if found.fits else "needs more memory"
    yield Alternative(draft=draft, seconds=found.seconds, reason=reason)
