"""All plans of the space that `auto` searches, for a handful of units and devices, and the fastest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

from lightning_gpp.planning import Evaluation, Evaluator, Problem
from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.draft import flows, stage_of_units


def best_of_all(problem: Problem) -> Evaluation:
    """The evaluation of the plan with the shortest step of all that fit the memory."""
    evaluate = Evaluator(problem)
    return min((evaluate(shape.draft()) for shape in shapes(problem)), key=lambda evaluation: evaluation.rank)


def shapes(problem: Problem) -> Iterator[Shape]:
    """Every plan once; replicas of a stage have devices next to each other."""
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
