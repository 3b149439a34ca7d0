"""Topological orders of the units that keep branches together: contiguous parts of an order never form a cycle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import networkx as nx

from lightning_gpp.planning.problem.problem import Array, Problem


def orders(problem: Problem, weights: Array) -> list[list[int]]:
    """Orders of units: recorded, level by level, and branch by branch from either end of the graph; without repeats."""
    found = dict.fromkeys(tuple(order) for order in _orders(problem.order, weights))
    return [list(order) for order in found]


def _orders(graph: nx.DiGraph, weights: Array) -> Iterator[list[int]]:
    for sign in (-1, 1):
        yield _branches(graph, _ranks(graph, weights, sign))
        yield _branches(graph.reverse(), _ranks(graph.reverse(), weights, sign))[::-1]
    yield list(range(len(weights)))
    yield [unit for level in nx.topological_generations(graph) for unit in sorted(level)]


def _ranks(graph: nx.DiGraph, weights: Array, sign: int) -> dict[int, tuple[float, int]]:
    """Sort keys of branches: light ones first (sign 1) or heavy ones first (-1)."""
    return {unit: (sign * weight, unit) for unit, weight in _reaching(graph, weights).items()}


def _reaching(graph: nx.DiGraph, weights: Array) -> dict[int, float]:
    """For every unit the weight of the longest path that leads to it."""
    reached: dict[int, float] = {}
    for unit in nx.topological_sort(graph):
        reached[unit] = float(weights[unit]) + max((reached[source] for source in graph.predecessors(unit)), default=0)
    return reached


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
