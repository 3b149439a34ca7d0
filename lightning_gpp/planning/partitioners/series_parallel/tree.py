"""Series-parallel trees: what they are, and what can be read off them.

Nodes are the leaves. In `Series(parts)` every node of a part comes before every node of the next; in
`Parallel(parts)` nodes of different parts are not ordered. A block between a fork and a join operator is thus
`Series((Leaf(fork), Parallel(branches), Leaf(join)))`.

Nothing here recurses, so that trees may be as deep as a model. (Comparing and hashing trees does.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import networkx as nx

TreeNode: TypeAlias = Hashable
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A single node."""

    node: TreeNode


@dataclass(frozen=True, slots=True)
class Series:
    """At least two parts, one after the other; none of them is a Series."""

    parts: tuple[Leaf | Parallel, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """At least two parts without any order between them; none of them is a Parallel."""

    parts: tuple[Leaf | Series, ...]


Tree: TypeAlias = Leaf | Series | Parallel


def series(parts: Iterable[Tree]) -> Tree:
    """The parts one after the other: flattened, and a single part as it is."""
    flat: list[Leaf | Parallel] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Series) else (part,))
    return Series(tuple(flat)) if len(flat) > 1 else flat[0]


def parallel(parts: Iterable[Tree]) -> Tree:
    """The parts side by side, in the given order: flattened, and a single part as it is."""
    flat: list[Leaf | Series] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Parallel) else (part,))
    return Parallel(tuple(flat)) if len(flat) > 1 else flat[0]


def subtrees(tree: Tree) -> Iterator[Tree]:
    """The tree and everything below it: parents before children, children from left to right."""
    stack = [tree]
    while stack:
        part = stack.pop()
        yield part
        if not isinstance(part, Leaf):
            stack.extend(reversed(part.parts))


def leaves(tree: Tree) -> tuple[TreeNode, ...]:
    """All nodes, from left to right: a topological order."""
    return tuple(part.node for part in subtrees(tree) if isinstance(part, Leaf))


def evaluate(
    tree: Tree, *, leaf: Callable[[TreeNode], T], series: Callable[[list[T]], T], parallel: Callable[[list[T]], T]
) -> T:
    """The value of a tree from the values of its parts, from the leaves upwards."""
    values: list[T] = []
    for part in reversed(list(subtrees(tree))):
        if isinstance(part, Leaf):
            values.append(leaf(part.node))
        else:
            values.append((series if isinstance(part, Series) else parallel)(take(values, len(part.parts))))
    return values[0]


def take(values: list[T], count: int) -> list[T]:
    """Remove the last values: those of the parts of one tree, of which the leftmost was computed last."""
    taken = values[-count:][::-1]
    del values[-count:]
    return taken


def describe(tree: Tree) -> str:
    """One line, like S(0, P(S(1, 2), 3), 4)."""
    return evaluate(
        tree,
        leaf=str,
        series=lambda parts: f"S({', '.join(parts)})",
        parallel=lambda parts: f"P({', '.join(parts)})",
    )


def critical_path(tree: Tree, weights: Mapping[TreeNode, float]) -> float:
    """The weight of the heaviest chain of nodes, in the unit of the weights."""
    weight: float = evaluate(tree, leaf=weights.__getitem__, series=sum, parallel=max)
    return weight


def num_ordered(tree: Tree) -> int:
    """Number of pairs of nodes that the tree orders; the fewer, the more nodes can run at the same time."""
    count = 0

    def in_series(sizes: list[int]) -> int:
        nonlocal count
        count += (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
        return sum(sizes)

    def side_by_side(sizes: list[int]) -> int:
        return sum(sizes)

    evaluate(tree, leaf=lambda node: 1, series=in_series, parallel=side_by_side)
    return count


def order_of(tree: Tree) -> nx.DiGraph:
    """The order as a graph without edges that follow from others: sinks of a part to sources of the next."""
    graph = nx.DiGraph()
    graph.add_nodes_from(leaves(tree))
    Ends: TypeAlias = tuple[list[TreeNode], list[TreeNode]]

    def in_series(parts: list[Ends]) -> Ends:
        for (_, sinks), (sources, _) in zip(parts, parts[1:], strict=False):
            graph.add_edges_from((sink, source) for sink in sinks for source in sources)
        return parts[0][0], parts[-1][1]

    def side_by_side(parts: list[Ends]) -> Ends:
        return [node for sources, _ in parts for node in sources], [node for _, sinks in parts for node in sinks]

    evaluate(tree, leaf=lambda node: ([node], [node]), series=in_series, parallel=side_by_side)
    return graph
