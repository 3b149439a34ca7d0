"""The changes of shapes in the numbers of devices that share the work inside a stage (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Final

from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.problem import Problem

MOST_GIVERS: Final = 4
"""Number of stages, those with the least work, of which two together give devices to a third."""


def member_moves(
    problem: Problem, shape: Shape, slow: Sequence[int], fast: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> Iterator[Shape]:
    """Devices of stages get more or fewer members.

    Args:
        problem: the question.
        shape: the shape to change.
        slow: the stages with the most work, which change first.
        fast: all stages, those with the least work first.
        pairs: stages that can be merged, see `Shape.merged`.
    """
    for stage in slow:
        yield from _changed(problem, shape, stage)
        yield from _grown(problem, shape, stage, fast)
        yield from _grown_by_merging(problem, shape, stage, pairs)
        yield from _shrunk(problem, shape, stage, fast)
        yield from _halved(problem, shape, stage)
    yield from _merged(problem, shape, pairs)


def _changed(problem: Problem, shape: Shape, stage: int) -> Iterator[Shape]:
    """On the same devices of the cluster, the stage has half as many replicas of twice the members, or conversely."""
    count, number = shape.replicas[stage], shape.all_members[stage]
    if 2 * number in problem.members and count % 2 == 0:
        yield shape.with_members({stage: (count // 2, 2 * number)})
    if number // 2 in problem.members and 2 * count <= problem.max_replicas:
        yield shape.with_members({stage: (2 * count, number // 2)})


def _grown(problem: Problem, shape: Shape, stage: int, fast: Sequence[int]) -> Iterator[Shape]:
    """Replicas get twice as many members, which other stages, or idle devices, give: replicas, or half of theirs."""
    count, number = shape.replicas[stage], shape.all_members[stage]
    grown, needed = {stage: (count, 2 * number)}, count * number
    if 2 * number not in problem.members:
        return
    if problem.num_devices - shape.num_devices >= needed:
        yield shape.with_members(grown)
    others = [other for other in fast if other != stage]
    for other in others:
        yield from (shape.with_members(grown | {other: left}) for left in _giving(problem, shape, other, needed))
    for first, second in combinations(others[:MOST_GIVERS], 2) if needed % 2 == 0 else ():
        ways = _giving(problem, shape, first, needed // 2), _giving(problem, shape, second, needed // 2)
        yield from (shape.with_members(grown | {first: left, second: rest}) for left, rest in product(*ways))


def _giving(problem: Problem, shape: Shape, stage: int, number: int) -> list[tuple[int, int]]:
    """The replicas and members that a stage has after it gave this number of devices of the cluster, in all ways."""
    count, members = shape.replicas[stage], shape.all_members[stage]
    ways = [(count - number // members, members)] if number % members == 0 and number < count * members else []
    halves = members // 2 in problem.members and number == count * members // 2
    return [*ways, (count, members // 2)] if halves else ways


def _grown_by_merging(problem: Problem, shape: Shape, stage: int, pairs: Sequence[tuple[int, int]]) -> Iterator[Shape]:
    """The same, with the devices of one of two other stages, which are merged."""
    count, number = shape.replicas[stage], shape.all_members[stage]
    for first, second in pairs if 2 * number in problem.members else ():
        if stage not in (first, second) and shape.processes[first] == count * number:
            merged = shape.merged(first, second, shape.replicas[second])
            yield merged.with_members({stage - (stage > first): (count, 2 * number)})


def _shrunk(problem: Problem, shape: Shape, stage: int, fast: Sequence[int]) -> Iterator[Shape]:
    """The stage gets half as many members; another one gets the others, as replicas or as members."""
    count, half = shape.replicas[stage], shape.all_members[stage] // 2
    left = count * half
    if half not in problem.members:
        return
    for other in reversed(fast):
        replicas, members = shape.replicas[other], shape.all_members[other]
        if other != stage and left % members == 0 and replicas + left // members <= problem.max_replicas:
            yield shape.with_members({stage: (count, half), other: (replicas + left // members, members)})
        if other != stage and left == replicas * members and 2 * members in problem.members:
            yield shape.with_members({stage: (count, half), other: (replicas, 2 * members)})


def _halved(problem: Problem, shape: Shape, stage: int) -> Iterator[Shape]:
    """The stage becomes two, each with half of the members."""
    count, half, group = shape.replicas[stage], shape.all_members[stage] // 2, shape.groups[stage]
    if half in problem.members and len(group) > 1:
        seconds = problem.seconds(-(-shape.size // count)).total[list(group)].cumsum()
        position = min(int(seconds.searchsorted(seconds[-1] / 2)) + 1, len(group) - 1)
        yield shape.divided(stage, group[:position], count, count, half)


def _merged(problem: Problem, shape: Shape, pairs: Sequence[tuple[int, int]]) -> Iterator[Shape]:
    """Two stages become one on the devices of both, with any other number of members."""
    for first, second in pairs:
        everything = shape.processes[first] + shape.processes[second]
        for number in problem.members:
            count, rest = divmod(everything, number)
            if not rest and number != shape.all_members[second] and count <= problem.max_replicas:
                merged = shape.merged(first, second, shape.replicas[second])
                yield merged.with_members({second - (second > first): (count, number)})
