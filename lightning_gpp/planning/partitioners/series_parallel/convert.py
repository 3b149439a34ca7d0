"""Makes any graph series-parallel, with little delay.

Nothing is computed twice, only order is added: next to nothing for what many read and costs next to nothing, as masks.
The plainest conversion makes every depth of the graph wait for all nodes of the depth before (`_strata`). Here only the
parts that are not series-parallel change: the lighter of their strata and of cuts in two (`_halves`) is taken. Series
and parallel parts need no choice: converting their pieces separately loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import networkx as nx

from lightning_gpp.planning.partitioners.series_parallel.tree import (
    Leaf,
    Order,
    OrderedPart,
    Tree,
    TreeNode,
    critical_path,
    expand,
    mask_of,
    num_ordered,
    order_from,
    order_of,
    pairs_across,
    parallel,
    series,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A series-parallel order that contains the order of a graph.

    Args:
        tree: all nodes.
        added: pairs of nodes that the graph leaves unordered; together with its edges they give the tree's order.
        price: the tree's critical path divided by the graph's, at least 1.
    """

    tree: Tree
    added: tuple[tuple[TreeNode, TreeNode], ...]
    price: float


def make_series_parallel(graph: nx.DiGraph, weights: Mapping[TreeNode, float] | None = None) -> Conversion:
    """The graph's own tree if it has one; otherwise one with order added as needed.

    Args:
        graph: an acyclic graph.
        weights: seconds of all nodes, not negative; 1 each by default.

    Raises:
        networkx.NetworkXUnfeasible: the graph has a cycle.
        ValueError: the graph has no nodes.
    """
    weights = dict.fromkeys(graph, 1.0) if weights is None else weights
    order = order_from(graph)
    tree = expand(order, order.everything, lambda part: None)
    if tree is not None:
        return Conversion(tree=tree, added=(), price=1.0)
    tree = _convert(order, _integers([weights[node] for node in order.nodes]))
    return Conversion(tree=tree, added=_added(order, tree), price=_price(order, tree, weights))


def _integers(weights: Sequence[float]) -> list[int]:
    """Integer weights, whose sums have no rounding errors, to 12 digits of the total."""
    total = sum(weights)
    return [round(weight / total * 2**40) if total else 0 for weight in weights]


def _convert(order: Order, weights: Sequence[int]) -> Tree:
    """A light tree that contains the order."""
    by_node = dict(zip(order.nodes, weights, strict=True))

    def lightest(part: OrderedPart) -> Tree:
        found = expand(order, part, partial(_halves, order, weights))
        assert found is not None
        return min((found, _strata(order, part)), key=lambda tree: (critical_path(tree, by_node), num_ordered(tree)))

    tree = expand(order, order.everything, lightest)
    assert tree is not None
    return tree


def _halves(order: Order, weights: Sequence[int], part: OrderedPart) -> tuple[OrderedPart, OrderedPart]:
    """The part in two, of which the second then waits for all of the first: whose bound of the critical path is lowest,
    and of those whose pairs across are new in the smallest share.

    A connected part that is not series-parallel becomes so only by such a cut: neither half's own order changes, nor
    that of the nodes around it. The bound is the sum of both halves' critical paths. Cuts are those after each position
    of two orders, by earliest end and by latest start, so no cut of the part has a lower bound than the best of these.
    """
    heads, tails = longest_paths(order, part, weights)
    mask, best = mask_of(part), None
    for ordered in (
        sorted(part, key=lambda number: (heads[number], number)),
        sorted(part, key=lambda number: (-tails[number], number)),
    ):
        until = list(accumulate((heads[number] for number in ordered), max))
        after = list(accumulate((tails[number] for number in reversed(ordered)), max))[::-1]
        for size, across in enumerate(pairs_across(order, ordered, mask)[:-1], start=1):
            pairs = size * (len(ordered) - size)
            rank = until[size - 1] + after[size], (pairs - across) / pairs
            if best is None or rank < best[0]:
                best = rank, tuple(sorted(ordered[:size])), tuple(sorted(ordered[size:]))
    assert best is not None
    return best[1], best[2]


def _strata(order: Order, part: OrderedPart) -> Tree:
    """Nodes by their depth, with a full synchronisation between one depth and the next."""
    depths, _ = longest_paths(order, part, [1] * len(order.nodes))
    levels: dict[int, list[Tree]] = {}
    for number in part:
        levels.setdefault(depths[number], []).append(Leaf(order.nodes[number]))
    return series(parallel(levels[depth]) for depth in sorted(levels))


W = TypeVar("W", int, float)


def longest_paths(order: Order, part: OrderedPart, weights: Sequence[W]) -> tuple[dict[int, W], dict[int, W]]:
    """Weights of the heaviest paths inside the part that end at, and that start at, every number, itself included."""
    heads: dict[int, W] = {}
    for number in part:
        heads[number] = weights[number] + max(
            (heads[other] for other in order.below[number] if other in heads), default=0
        )
    tails: dict[int, W] = {}
    for number in reversed(part):
        tails[number] = weights[number] + max(
            (tails[other] for other in order.above[number] if other in tails), default=0
        )
    return heads, tails


def _added(order: Order, tree: Tree) -> tuple[tuple[TreeNode, TreeNode], ...]:
    number = {node: index for index, node in enumerate(order.nodes)}
    pairs = ((number[lower], number[upper]) for lower, upper in order_of(tree).edges)
    new = sorted((lower, upper) for lower, upper in pairs if not order.after[lower] >> upper & 1)
    return tuple((order.nodes[lower], order.nodes[upper]) for lower, upper in new)


def _price(order: Order, tree: Tree, weights: Mapping[TreeNode, float]) -> float:
    heads, _ = longest_paths(order, order.everything, [weights[node] for node in order.nodes])
    before, after = max(heads.values()), critical_path(tree, weights)
    return max(1.0, round(after / before, 12)) if before else 1.0  # the rest is rounding
