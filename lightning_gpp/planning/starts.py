"""First partitions for the search: orders of the units that keep branches together, cut into the best contiguous parts.

Contiguous parts of a topological order never form a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import networkx as nx

from lightning_gpp.planning.partition import Problem

CHARGES = (0.0, 0.5)
"""Charges for parts of unconnected branches, in mean stage times: without one, and with one that keeps most apart."""


def starts(problem: Problem) -> Iterator[list[int]]:
    """Stage numbers of all units, for several orders and charges, without repeats."""
    mean = sum(problem.seconds) / problem.num_stages
    seen = set()
    for order in orders(problem):
        parts = [list(_parts(problem, order, start)) for start in range(len(order))]
        for charge in CHARGES:
            priced = [[seconds + charge * mean * (branches - 1) for seconds, branches in row] for row in parts]
            stages = cut(problem.num_stages, order, priced)
            if tuple(stages) not in seen:
                seen.add(tuple(stages))
                yield stages


def orders(problem: Problem) -> Iterator[list[int]]:
    """Topological orders: as recorded, level by level, and branch after branch from either end of the graph."""
    graph = problem.units.graph()
    yield list(range(len(problem.seconds)))
    yield [unit for level in nx.topological_generations(graph) for unit in sorted(level)]
    for sign in (1, -1):
        yield _branches(graph, _ranks(graph, problem.seconds, sign))
        yield _branches(graph.reverse(), _ranks(graph.reverse(), problem.seconds, sign))[::-1]


def _ranks(graph: nx.DiGraph, seconds: Sequence[float], sign: int) -> dict[int, tuple[float, int]]:
    """What branches are sorted by: light ones first (sign 1) or heavy ones first (-1)."""
    return {unit: (sign * weight, unit) for unit, weight in _reaching(graph, seconds).items()}


def _reaching(graph: nx.DiGraph, seconds: Sequence[float]) -> dict[int, float]:
    """For every unit the seconds of all units it needs, itself included."""
    needed: dict[int, int] = {}
    for unit in nx.topological_sort(graph):
        mask = 1 << unit
        for source in graph.predecessors(unit):
            mask |= needed[source]
        needed[unit] = mask
    return {unit: sum(s for i, s in enumerate(seconds) if mask >> i & 1) for unit, mask in needed.items()}


def _branches(graph: nx.DiGraph, ranks: Mapping[int, tuple[float, int]]) -> list[int]:
    """Depth-first from the sinks: everything that a unit needs comes before it, one branch after the other."""
    order: dict[int, None] = {}
    stack = sorted((unit for unit in graph if not graph.out_degree(unit)), key=ranks.__getitem__, reverse=True)
    while stack:
        unit = stack[-1]
        missing = sorted(
            (source for source in graph.predecessors(unit) if source not in order), key=ranks.__getitem__, reverse=True
        )
        if missing and unit not in order:
            stack.extend(missing)
        else:
            order.setdefault(stack.pop())
    return list(order)


def cut(num_stages: int, order: Sequence[int], parts: Sequence[Sequence[float]]) -> list[int]:
    """The contiguous cut of an order into stages whose slowest part is fastest, by dynamic programming.

    Args:
        num_stages: how many parts.
        order: of all units.
        parts: for every position of the order the seconds of the parts that begin there, with 1, 2, ... units.

    Returns:
        The stage number of every unit.
    """
    best = [0.0] + [inf] * len(order)
    choices: list[list[int]] = []
    for _ in range(num_stages):
        reached, choice = [inf] * (len(order) + 1), [0] * (len(order) + 1)
        for start, before in enumerate(best[:-1]):
            for length, seconds in enumerate(parts[start] if before < inf else (), start=1):
                worst = before if before > seconds else seconds
                if worst < reached[start + length]:
                    reached[start + length], choice[start + length] = worst, start
        best = reached
        choices.append(choice)
    return _stages(order, choices)


def _stages(order: Sequence[int], choices: Sequence[Sequence[int]]) -> list[int]:
    stages, stop = [0] * len(order), len(order)
    for stage in reversed(range(len(choices))):
        start = choices[stage][stop]
        for unit in order[start:stop]:
            stages[unit] = stage
        stop = start
    return stages


def _parts(problem: Problem, order: Sequence[int], start: int) -> Iterator[tuple[float, int]]:
    """Seconds and unconnected branches of the parts that begin at `start`, up to a size that some cut never exceeds."""
    limit = 1.5 * sum(problem.seconds) / problem.num_stages + max(problem.seconds)
    compute = crossing = 0.0
    ends: Counter[int] = Counter()
    branches: list[set[int]] = []
    for unit in order[start:]:
        compute += problem.seconds[unit]
        if branches and compute > limit:
            return
        crossing += _enter(problem, unit, ends)
        branches = _joined(branches, unit, problem.neighbours[unit])
        yield compute + crossing, len(branches)


def _enter(problem: Problem, unit: int, ends: Counter[int]) -> float:
    """Change of the seconds of values that cross a part's border when a unit enters it.

    `ends` counts the units inside that make or read a value: it crosses if some of them are inside, and some are not.
    """
    change = 0.0
    for index in (*problem.made[unit], *problem.read[unit]):
        flow = problem.flows[index]
        ends[index] += 1
        if ends[index] == 1:
            change += flow.seconds
        if ends[index] == 1 + len(flow.dsts):
            change -= flow.seconds
    return change


def _joined(branches: list[set[int]], unit: int, neighbours: set[int]) -> list[set[int]]:
    """The branches with a further unit, which connects those that it neighbours; the largest set grows in place."""
    touching = sorted((branch for branch in branches if branch & neighbours), key=len, reverse=True)
    joined = touching[0] if touching else set()
    joined.add(unit)
    joined.update(*touching[1:])
    return [*(branch for branch in branches if not branch & neighbours and branch is not joined), joined]
