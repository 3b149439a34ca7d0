"""A layout of a stage graph in columns, such that no edge crosses a stage.

An edge that spans several columns keeps a place of its own in each column between, so it passes beside the stages; it
bends only in the gaps between columns. Orders within columns are found by barycenters (Sugiyama, Tagawa and Toda 1981),
heights by least squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

import networkx as nx

GridPlace = int | tuple[int, int, int]
"""A stage, or the place (src, dst, column) of an edge in a column that it passes."""

SWEEPS: Final = 12
"""Sweeps over all columns, for orders and then for heights."""

PASSAGE: Final = 0.4
"""Height of the place of an edge, in heights of a stage."""

LIGHT: Final = 0.05
"""Weight of a passing edge, relative to a stage, where both want the same place."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The columns of a graph.

    Args:
        columns: stages and passing edges of every column, from top to bottom.
        heights: vertical centre of each, in heights of a stage with the gap below it; the least is 0.
        routes: what every edge (src, dst) passes, both ends included.
    """

    columns: tuple[tuple[GridPlace, ...], ...]
    heights: Mapping[GridPlace, float]
    routes: Mapping[tuple[int, int], tuple[GridPlace, ...]]


def layers(graph: nx.DiGraph) -> Layers:
    """Columns by the distance to the sink: what can compute at the same time is side by side, near its reader."""
    columns = _columns(graph)
    column_of = {node: number for number, nodes in enumerate(columns) for node in nodes}
    routes: dict[tuple[int, int], tuple[GridPlace, ...]] = {}
    for src, dst in graph.edges:
        between = [(src, dst, number) for number in range(column_of[src] + 1, column_of[dst])]
        for place in between:
            columns[place[2]].append(place)
        routes[src, dst] = (src, *between, dst)
    links = nx.Graph([pair for route in routes.values() for pair in pairwise(route)])
    links.add_nodes_from(node for nodes in columns for node in nodes)
    ordered = _ordered(columns, links)
    return Layers(tuple(map(tuple, ordered)), _heights(ordered, links), routes)


def _columns(graph: nx.DiGraph) -> list[list[GridPlace]]:
    generations = list(nx.topological_generations(graph.reverse()))
    return [sorted(generation) for generation in reversed(generations)]


def _ordered(columns: Sequence[Sequence[GridPlace]], links: nx.Graph) -> list[list[GridPlace]]:
    """The order with the fewest crossings among those that the sweeps come by."""
    best = now = [list(nodes) for nodes in columns]
    for sweep in range(SWEEPS):
        now = [list(nodes) for nodes in now]
        for number, neighbour in _steps(len(now), forwards=sweep % 2 == 0):
            rank = {node: index for index, node in enumerate(now[neighbour])}
            now[number] = _by_barycenter(now[number], rank, links)
        best = min(best, now, key=lambda order: crossings(order, links))
    return best


def _steps(number: int, *, forwards: bool) -> list[tuple[int, int]]:
    """Columns with the neighbour that each is ordered by."""
    pairs = list(pairwise(range(number)))
    return [(after, before) for before, after in pairs] if forwards else pairs[::-1]


def _by_barycenter(nodes: Sequence[GridPlace], rank: Mapping[GridPlace, int], links: nx.Graph) -> list[GridPlace]:
    own = {node: index for index, node in enumerate(nodes)}

    def center(node: GridPlace) -> float:
        near = [rank[other] for other in links[node] if other in rank]
        return fmean(near) if near else own[node]

    return sorted(nodes, key=lambda node: (center(node), own[node]))


def crossings(columns: Sequence[Sequence[GridPlace]], links: nx.Graph) -> int:
    """Pairs of edges that cross between neighbouring columns."""
    total = 0
    for left, right in pairwise(columns):
        rank = {node: index for index, node in enumerate(right)}
        ends = [sorted(rank[other] for other in links[node] if other in rank) for node in left]
        total += sum(
            low > high
            for index, upper in enumerate(ends)
            for lower in ends[index + 1 :]
            for low in upper
            for high in lower
        )
    return total


def _heights(columns: Sequence[Sequence[GridPlace]], links: nx.Graph) -> dict[GridPlace, float]:
    heights = {node: offset for nodes in columns for node, offset in zip(nodes, _offsets(nodes), strict=True)}
    for sweep in range(SWEEPS):
        for number, neighbour in _steps(len(columns), forwards=sweep % 2 == 1):
            nodes, near = columns[number], links.subgraph([*columns[number], *columns[neighbour]])
            wanted = [_wanted(node, heights, near) for node in nodes]
            weights = [1.0 if isinstance(node, int) else LIGHT for node in nodes]
            heights.update(zip(nodes, _apart(wanted, weights, _offsets(nodes)), strict=True))
    top = min(heights.values(), default=0.0)
    return {node: height - top for node, height in heights.items()}


def _wanted(node: GridPlace, heights: Mapping[GridPlace, float], links: nx.Graph) -> float:
    """The mean height of the neighbours; for a stage that has some, of the stages among them, in line with which it
    looks like a chain."""
    near = list(links[node])
    stages = [other for other in near if isinstance(node, int) and isinstance(other, int)]
    return fmean([heights[other] for other in stages or near] or [heights[node]])


def _offsets(nodes: Sequence[GridPlace]) -> list[float]:
    """Centres of the nodes of a column if they are packed."""
    offsets, bottom = [], 0.0
    for node in nodes:
        size = 1.0 if isinstance(node, int) else PASSAGE
        offsets.append(bottom + size / 2)
        bottom += size
    return offsets


def _apart(wanted: Sequence[float], weights: Sequence[float], offsets: Sequence[float]) -> list[float]:
    """The centres nearest to the wanted ones (weighted least squares) at which nothing overlaps.

    Without the offsets this is an isotonic regression: neighbours in the wrong order share their mean.
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, total, number = value - offset, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, others, count = blocks.pop()
            mean, total, number = (other * others + mean * total) / (others + total), others + total, count + number
        blocks.append((mean, total, number))
    means = [mean for mean, _, number in blocks for _ in range(number)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
