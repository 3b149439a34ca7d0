"""Makes any graph series-parallel, with the least delay found.

Broadcasts of negligible cost are left to their readers; everything else is computed once, and only order is added. The
plainest conversion makes every depth of the graph wait for all nodes of the depth before (`strata`). Here only the
parts that are not series-parallel change, and several conversions of each are tried (`cuts`), strata among them. Series
and parallel parts need no choice: converting their pieces separately loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import networkx as nx

from lightning_gpp.planning.partitioners.series_parallel.cuts import Cut, cuts, longest_paths
from lightning_gpp.planning.partitioners.series_parallel.search import SMALL, CutSearch
from lightning_gpp.planning.partitioners.series_parallel.tree import (
    Leaf,
    Order,
    OrderedPart,
    Tree,
    TreeNode,
    critical_path,
    expand,
    order_from,
    order_of,
    parallel,
    series,
)

NEGLIGIBLE = 0.01
"""Below this share of the mean weight of all nodes, a node costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A series-parallel order that contains the order of a graph.

    Args:
        tree: all nodes that were not inlined.
        added: pairs of nodes that the graph leaves unordered; together with its edges they give the tree's order.
        price: the tree's critical path divided by the graph's, at least 1.
        inlined: nodes that are computed again by each of their readers, in topological order.
    """

    tree: Tree
    added: tuple[tuple[TreeNode, TreeNode], ...]
    price: float
    inlined: tuple[TreeNode, ...]


def make_series_parallel(
    graph: nx.DiGraph,
    weights: Mapping[TreeNode, float] | None = None,
    *,
    fraction: float = NEGLIGIBLE,
    keep: Collection[TreeNode] = (),
) -> Conversion:
    """The graph's own tree if it has one; otherwise that of the graph without broadcasts, with order added as needed.

    Args:
        graph: an acyclic graph.
        weights: seconds of all nodes, not negative; 1 each by default.
        fraction, keep: see `inline_broadcasts`.

    Raises:
        networkx.NetworkXUnfeasible: the graph has a cycle.
        ValueError: the graph has no nodes.
    """
    weights = dict.fromkeys(graph, 1.0) if weights is None else weights
    order = order_from(graph)
    tree = expand(order, order.everything, lambda part: None)
    if tree is not None:
        return Conversion(tree=tree, added=(), price=1.0, inlined=())
    graph, inlined = inline_broadcasts(graph, weights, fraction=fraction, keep=keep)
    order = order_from(graph)
    tree = _convert(order, _integers([weights[node] for node in order.nodes]))
    return Conversion(tree=tree, added=_added(order, tree), price=_price(order, tree, weights), inlined=inlined)


def inline_broadcasts(
    graph: nx.DiGraph,
    weights: Mapping[TreeNode, float],
    *,
    fraction: float = NEGLIGIBLE,
    keep: Collection[TreeNode] = (),
) -> tuple[nx.DiGraph, tuple[TreeNode, ...]]:
    """The graph without the nodes that each of their readers may compute again: masks, positions, constants.

    They cost next to nothing, have no predecessors except such nodes, and are read by several other nodes, directly or
    through each other. Nodes that cost next to nothing and have only inlined predecessors are inlined, too. All other
    nodes keep their order, because no inlined node is between two of them.

    Args:
        graph: an acyclic graph.
        weights: seconds of all nodes.
        fraction: a node below this fraction of the mean weight costs next to nothing.
        keep: nodes never to inline, such as those with parameters.

    Returns:
        The graph of the other nodes, and the inlined nodes in topological order.
    """
    limit = fraction * sum(weights[node] for node in graph) / max(1, len(graph))
    light: dict[TreeNode, None] = {}
    for node in nx.topological_sort(graph):
        if weights[node] < limit and node not in keep and all(other in light for other in graph.pred[node]):
            light[node] = None
    readers = _readers(graph, light)
    inlined: dict[TreeNode, None] = {}
    for node in light:
        sources = graph.pred[node]
        if len(readers[node]) > 1 or (sources and all(other in inlined for other in sources)):
            inlined[node] = None
    return graph.subgraph([node for node in graph if node not in inlined]), tuple(inlined)


def _readers(graph: nx.DiGraph, light: Mapping[TreeNode, None]) -> dict[TreeNode, set[TreeNode]]:
    """The other nodes that read each light node, directly or through light nodes only."""
    readers: dict[TreeNode, set[TreeNode]] = {}
    for node in reversed(list(light)):
        readers[node] = set().union(*(readers[other] if other in light else {other} for other in graph.succ[node]))
    return readers


def _integers(weights: Sequence[float]) -> list[int]:
    """Integer weights, whose sums have no rounding errors, to 12 digits of the total."""
    total = sum(weights)
    return [round(weight / total * 2**40) if total else 0 for weight in weights]


def _convert(order: Order, weights: Sequence[int]) -> Tree:
    """The lightest tree found that contains the order."""
    search = CutSearch(order, weights)
    tree = expand(order, order.everything, lambda part: search.lightest(_trees(order, part, weights, search)))
    assert tree is not None
    return tree


def _trees(order: Order, part: OrderedPart, weights: Sequence[int], search: CutSearch) -> Iterator[Tree]:
    """Trees of a prime part: as strata, and by cuts with different choices among equal bounds."""
    yield strata(order, part)
    for rule in (Cut.by_share, Cut.by_number, Cut.by_balance):
        tree = expand(order, part, partial(_first_cut, order, weights, search, rule))
        if tree is not None:
            yield tree


def _first_cut(
    order: Order, weights: Sequence[int], search: CutSearch, rule: Callable[[Cut], tuple[float, ...]], part: OrderedPart
) -> Tree | tuple[OrderedPart, OrderedPart]:
    if len(part) <= SMALL:
        return search.tree(part)
    return min(cuts(order, part, weights), key=rule).halves()


def strata(order: Order, part: OrderedPart) -> Tree:
    """Nodes by their depth, with a full synchronisation between one depth and the next."""
    depths, _ = longest_paths(order, part, [1] * len(order.nodes))
    levels: dict[int, list[Tree]] = {}
    for number in part:
        levels.setdefault(depths[number], []).append(Leaf(order.nodes[number]))
    return series(parallel(levels[depth]) for depth in sorted(levels))


def _added(order: Order, tree: Tree) -> tuple[tuple[TreeNode, TreeNode], ...]:
    number = {node: index for index, node in enumerate(order.nodes)}
    pairs = ((number[lower], number[upper]) for lower, upper in order_of(tree).edges)
    new = sorted((lower, upper) for lower, upper in pairs if not order.after[lower] >> upper & 1)
    return tuple((order.nodes[lower], order.nodes[upper]) for lower, upper in new)


def _price(order: Order, tree: Tree, weights: Mapping[TreeNode, float]) -> float:
    heads, _ = longest_paths(order, order.everything, [weights[node] for node in order.nodes])
    before, after = max(heads.values()), critical_path(tree, weights)
    return max(1.0, round(after / before, 12)) if before else 1.0  # the rest is rounding
