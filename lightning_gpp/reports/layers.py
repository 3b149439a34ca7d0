"""A layout of a stage graph in columns, such that no edge crosses a stage.

An edge that spans several columns keeps a place of its own in each column between, so it passes beside the stages; it
bends only in the gaps between columns. Orders within columns are found by barycenters (Sugiyama, Tagawa and Toda 1981).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final

import networkx as nx

GridPlace = int | tuple[int, int, int]
"""A stage, or the place (src, dst, column) of an edge in a column that it passes."""

SWEEPS: Final = 12
"""Sweeps over all columns for their orders."""

PASSAGE: Final = 0.4
"""Height of the place of an edge, in heights of a stage."""


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
    return Layers(tuple(map(tuple, ordered)), _heights(ordered), routes)


def _columns(graph: nx.DiGraph) -> list[list[GridPlace]]:
    generations = list(nx.topological_generations(graph.reverse()))
    return [sorted(generation) for generation in reversed(generations)]


def _ordered(columns: Sequence[Sequence[GridPlace]], links: nx.Graph) -> list[list[GridPlace]]:
    """Columns in which every node is as near as possible to its neighbours, so that few edges cross."""
    ordered = [list(nodes) for nodes in columns]
    forwards = list(pairwise(range(len(ordered))))
    backwards = [(after, before) for before, after in reversed(forwards)]
    for sweep in range(SWEEPS):
        for fixed, moved in backwards if sweep % 2 else forwards:
            rank = {node: index for index, node in enumerate(ordered[fixed])}
            near = {node: [rank[other] for other in links[node] if other in rank] for node in ordered[moved]}
            centers = {node: fmean(near[node] or [index]) for index, node in enumerate(ordered[moved])}
            ordered[moved].sort(key=centers.__getitem__)
    return ordered


def _heights(columns: Sequence[Sequence[GridPlace]]) -> dict[GridPlace, float]:
    """Centres of all nodes. The stages of a column lie around the same middle, so that chains are straight lines."""
    heights: dict[GridPlace, float] = {}
    for nodes in columns:
        sizes = [1.0 if isinstance(node, int) else PASSAGE for node in nodes]
        centers = {node: end - size / 2 for node, size, end in zip(nodes, sizes, accumulate(sizes), strict=True)}
        middle = fmean(center for node, center in centers.items() if isinstance(node, int))
        heights.update({node: center - middle for node, center in centers.items()})
    top = min(heights.values(), default=0.0)
    return {node: height - top for node, height in heights.items()}
