"""The order that a graph puts its nodes in, as bit masks: which nodes lie before and after each one.

Nodes are numbered in a topological order. Parts are tuples of such numbers, ascending; all parts that occur are
convex, so the covering pairs (edges that follow from no other edges) inside a part describe its order completely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from lightning_gpp.planning.partitioners.series_parallel.tree import TreeNode

OrderedPart: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """For every number its node, the masks of all numbers before and after it, and those covered by and covering it."""

    nodes: tuple[TreeNode, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    below: tuple[OrderedPart, ...]
    above: tuple[OrderedPart, ...]

    @property
    def everything(self) -> OrderedPart:
        return tuple(range(len(self.nodes)))


def order_from(graph: nx.DiGraph) -> Order:
    """The order of an acyclic graph; among nodes that may come next, the one first added to the graph is numbered next.

    Raises:
        networkx.NetworkXUnfeasible: the graph has a cycle.
        ValueError: the graph has no nodes.
    """
    if not graph:
        raise ValueError("A graph without nodes has no series-parallel tree.")
    position = {node: index for index, node in enumerate(graph)}
    nodes = tuple(nx.lexicographical_topological_sort(graph, key=position.__getitem__))
    number = {node: index for index, node in enumerate(nodes)}
    before, below = _closure([[number[other] for other in graph.pred[node]] for node in nodes])
    above: list[list[int]] = [[] for _ in nodes]
    for upper, lowers in enumerate(below):
        for lower in lowers:
            above[lower].append(upper)
    return Order(nodes=nodes, before=before, after=_after(above), below=below, above=tuple(map(tuple, above)))


def _closure(predecessors: list[list[int]]) -> tuple[tuple[int, ...], tuple[OrderedPart, ...]]:
    """The masks of all numbers before each one, and its predecessors less those that come before another one."""
    before: list[int] = []
    below: list[OrderedPart] = []
    for lowers in predecessors:
        mask, covered = 0, []
        for lower in sorted(lowers, reverse=True):
            if not mask >> lower & 1:
                covered.append(lower)
                mask |= before[lower] | 1 << lower
        before.append(mask)
        below.append(tuple(reversed(covered)))
    return tuple(before), tuple(below)


def _after(above: list[list[int]]) -> tuple[int, ...]:
    after = [0] * len(above)
    for lower in reversed(range(len(above))):
        for upper in above[lower]:
            after[lower] |= after[upper] | 1 << upper
    return tuple(after)


def mask_of(part: Iterable[int]) -> int:
    mask = 0
    for number in part:
        mask |= 1 << number
    return mask


def components(order: Order, part: OrderedPart) -> list[OrderedPart]:
    """The weakly connected components, by their first number."""
    unseen = set(part)
    found: list[OrderedPart] = []
    for start in part:
        if start in unseen:
            found.append(_component(order, start, unseen))
    return found


def _component(order: Order, start: int, unseen: set[int]) -> OrderedPart:
    unseen.remove(start)
    members = [start]
    for number in members:
        for neighbours in (order.below[number], order.above[number]):
            for neighbour in neighbours:
                if neighbour in unseen:
                    unseen.remove(neighbour)
                    members.append(neighbour)
    return tuple(sorted(members))


def consecutive(order: Order, part: OrderedPart) -> list[OrderedPart]:
    """The most pieces so that all of one piece lies before all of the next.

    Sorted by how much lies before them, the numbers of earlier pieces come first. A border is where all pairs across
    it are ordered.
    """
    mask = mask_of(part)
    ranks = {number: (order.before[number] & mask).bit_count() for number in part}
    ordered = sorted(part, key=ranks.__getitem__)
    pieces, start = [], 0
    for end, pairs in enumerate(pairs_across(order, ordered, mask), start=1):
        if pairs == end * (len(part) - end):
            pieces.append(tuple(sorted(ordered[start:end])))
            start = end
    return pieces


def pairs_across(order: Order, ordered: list[int], mask: int) -> list[int]:
    """Number of ordered pairs across the border behind each position of a topological order of a part."""
    across, total = [], 0
    for number in ordered:
        total += (order.after[number] & mask).bit_count() - (order.before[number] & mask).bit_count()
        across.append(total)
    return across
