"""Tries every plan of a small problem: the reference for all other partitioners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.draft import flows, stage_of_units
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Problem

MAX_PLANS = 2_000_000
"""A problem with more plans is refused."""


@register_partitioner("exhaustive")
def exhaustive(problem: Problem, control: SearchControl) -> Answer:
    """Find the plan with the shortest simulated step of all that fit the memory; for a handful of units and devices.

    If the time is up before all were tried, it is the best of those that were, and the notes say so.
    """
    evaluate, best, rank = Evaluator(problem), None, (inf, inf)
    notes: tuple[str, ...] = ()
    for shape in shapes(problem):
        draft = shape.draft()
        found = evaluate(draft).rank
        if found < rank:
            best, rank = draft, found
        if evaluate.evaluations % 100 == 0:
            control.report(0.0, rank[1])
            if control.expired:
                notes = (f"Not all plans were tried in strategy.search_seconds={control.seconds:g} seconds.",)
                break
        if evaluate.evaluations > MAX_PLANS:
            return _too_many(problem, evaluate.evaluations)
    return Answer(
        draft=None if best is None else evaluate.fitted(best),
        objective=rank[1],
        objective_name=f"seconds of a {problem.judged_by}",
        states=evaluate.evaluations,
        notes=notes,
    )


def _too_many(problem: Problem, states: int) -> Answer:
    note = f"There are more than {MAX_PLANS:,} plans; choose partitioner=auto, or larger units."
    return Answer(draft=None, objective_name=f"seconds of a {problem.judged_by}", states=states, notes=(note,))


def shapes(problem: Problem) -> Iterator[Shape]:
    """All plans of the space that `auto` searches; replicas of a stage have devices next to each other."""
    most = min(problem.num_units, problem.num_devices)
    for groups in _partitions(problem.num_units, most):
        if _acyclic(problem, groups):
            yield from _shapes_of(problem, groups)


def _partitions(num_units: int, most: int) -> Iterator[list[list[int]]]:
    """All ways to put units into at most `most` stages."""

    def extend(groups: list[list[int]], unit: int) -> Iterator[list[list[int]]]:
        if unit == num_units:
            yield [list(group) for group in groups]
            return
        for group in groups:
            group.append(unit)
            yield from extend(groups, unit + 1)
            group.pop()
        if len(groups) < most:
            yield from extend([*groups, [unit]], unit + 1)

    return extend([], 0)


def _acyclic(problem: Problem, groups: Sequence[Sequence[int]]) -> bool:
    pairs = set(flows(problem, stage_of_units(problem.num_units, groups)))
    remaining = set(range(len(groups)))
    while remaining:
        free = {stage for stage in remaining if not any(b == stage and a in remaining for a, b in pairs)}
        if not free:
            return False
        remaining -= free
    return True


def _shapes_of(problem: Problem, groups: Sequence[Sequence[int]]) -> Iterator[Shape]:
    for order in _orders(problem, groups):
        for replicas in _replicas(problem, len(groups)):
            for size, schedule in product(problem.sizes, problem.schedules):
                shape = Shape(
                    groups=tuple(tuple(groups[index]) for index in order),
                    replicas=replicas,
                    size=size,
                    schedule=schedule,
                )
                yield from (shape.at(places) for places in _places(problem, shape))
                if len(groups) > 1 and len(set(replicas)) == 1 < replicas[0]:
                    yield replace(shape, spread=True)


def _replicas(problem: Problem, num_stages: int) -> Iterator[tuple[int, ...]]:
    least = num_stages if problem.idle_devices else problem.num_devices
    for total in range(least, problem.num_devices + 1):
        yield from _compositions(total, num_stages, problem.max_replicas)


def _places(problem: Problem, shape: Shape) -> Iterator[tuple[int, ...]]:
    """The devices that may be used, device 0 first, in ascending order."""
    number, others = shape.num_devices, range(1, problem.num_devices)
    if problem.uniform:
        yield tuple(range(number))
    else:
        yield from ((0, *rest) for rest in combinations(others, number - 1))


def _orders(problem: Problem, groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Orders of the stages on the devices, the user's step last; only one if all devices and links are equal."""
    step = next(index for index, group in enumerate(groups) if problem.num_units - 1 in group)
    others = [index for index in range(len(groups)) if index != step]
    for order in [tuple(others)] if problem.uniform else permutations(others):
        yield (*order, step)


def _compositions(total: int, parts: int, most: float) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if total <= most:
            yield (total,)
        return
    for first in range(1, int(min(most, total - parts + 1)) + 1):
        for rest in _compositions(total - first, parts - 1, most):
            yield (first, *rest)
