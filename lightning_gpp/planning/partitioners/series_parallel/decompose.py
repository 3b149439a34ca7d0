"""Reading a graph as a series-parallel tree.

A graph is (node) series-parallel when its order is built from single nodes by putting orders one after the other and
side by side, which is so exactly when no four nodes form an N: a < c, b < c, b < d, and no other order among them
(Valdes, Tarjan, Lawler, The recognition of series parallel digraphs, SIAM J. Comput. 1982).

Only the order counts. Edges that follow from others do not: a residual or skip connection around a block, the
encoder's result read by every decoder layer, and the skips of a U-Net leave a chain a chain, and a mask read by every
layer counts for the first only. Every two-terminal (edge) series-parallel graph is series-parallel in this sense:
parallel parts lie between their shared terminals. The reverse is wrong: two nodes that both feed two others are
series-parallel here, and not there. The node form therefore accepts more models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import networkx as nx

from lightning_gpp.planning.partitioners.series_parallel.order import (
    Order,
    OrderedPart,
    components,
    consecutive,
    order_from,
)
from lightning_gpp.planning.partitioners.series_parallel.tree import (
    Leaf,
    Parallel,
    Series,
    Tree,
    parallel,
    series,
    take,
)

Combine: TypeAlias = Callable[[Sequence[Tree]], Tree]
Prime: TypeAlias = Callable[[OrderedPart], Tree | Sequence[OrderedPart] | None]
"""Treatment of a part that is neither parallel nor consecutive: returns a tree, or pieces to put in series."""


def decompose(graph: nx.DiGraph) -> Tree | None:
    """The series-parallel tree of an acyclic graph, None where its order is not series-parallel.

    Parallel parts are sorted by their first node in a topological order. Time is quadratic in the number of nodes at
    worst, for trees as deep as they have nodes.

    Raises:
        networkx.NetworkXUnfeasible: the graph has a cycle.
        ValueError: the graph has no nodes.
    """
    order = order_from(graph)
    return expand(order, order.everything, lambda part: None)


def expand(order: Order, part: OrderedPart, prime: Prime) -> Tree | None:
    """Divide a part again and again, down to single nodes; None as soon as `prime` has no answer."""
    steps: list[Tree | tuple[Combine, int]] = []
    stack = [part]
    while stack:
        step = _step(order, stack.pop(), prime)
        if step is None:
            return None
        if isinstance(step, tuple):
            combine, pieces = step
            stack.extend(reversed(pieces))
            steps.append((combine, len(pieces)))
        else:
            steps.append(step)
    return _assembled(steps)


def _step(order: Order, part: OrderedPart, prime: Prime) -> Tree | tuple[Combine, Sequence[OrderedPart]] | None:
    if len(part) == 1:
        return Leaf(order.nodes[part[0]])
    divided = divide(order, part)
    if divided is not None:
        return divided
    answer = prime(part)
    return answer if answer is None or isinstance(answer, Leaf | Series | Parallel) else (series, answer)


def divide(order: Order, part: OrderedPart) -> tuple[Combine, Sequence[OrderedPart]] | None:
    """The combination of a part of several nodes, and its pieces; None for a prime part."""
    pieces = components(order, part)
    if len(pieces) > 1:
        return parallel, pieces
    pieces = consecutive(order, part)
    return (series, pieces) if len(pieces) > 1 else None


def _assembled(steps: Sequence[Tree | tuple[Combine, int]]) -> Tree:
    trees: list[Tree] = []
    for step in reversed(steps):
        if isinstance(step, tuple):
            combine, count = step
            trees.append(combine(take(trees, count)))
        else:
            trees.append(step)
    return trees[0]
