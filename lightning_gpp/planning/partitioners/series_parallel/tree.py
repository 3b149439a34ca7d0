"""Series-parallel trees: their definition, their properties, and the decomposition of a graph.

Nodes are the leaves. In `Series(parts)` every node of a part comes before every node of the next; in
`Parallel(parts)` nodes of different parts are not ordered. A block between a fork and a join operator is thus
`Series((Leaf(fork), Parallel(branches), Leaf(join)))`.

Nothing here recurses, so that trees may be as deep as a model. (Comparing and hashing them does.)

A graph is (node) series-parallel if its order can be built from single nodes by putting orders one after the other and
side by side. That is the case if and only if no four nodes form an N: a < c, b < c, b < d, and no other order among
them (Valdes, Tarjan, Lawler, The recognition of series parallel digraphs, SIAM J. Comput. 1982).

Only the order counts, not edges that follow from others: with residual or skip connections around a block, an encoder's
result read by every decoder layer, or the skips of a U-Net, a chain is still a chain, and a mask read by every layer
counts for the first only. Every two-terminal (edge) series-parallel graph is series-parallel in this sense: its
parallel parts are between their shared terminals. The converse is false: two nodes that both feed two others are
series-parallel here, but not there. So the node form accepts more models.

Nodes are numbered in a topological order, and orders are bit masks of the nodes before and after each one. Parts are
ascending tuples of numbers; all parts that occur are convex, so the covering pairs (edges that follow from no others)
inside a part describe its order completely.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    """The parts one after the other, flattened; a single part is returned unchanged."""
    flat: list[Leaf | Parallel] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Series) else (part,))
    return Series(tuple(flat)) if len(flat) > 1 else flat[0]


def parallel(parts: Iterable[Tree]) -> Tree:
    """The parts side by side, in the given order, flattened; a single part is returned unchanged."""
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
    """Compute the value of a tree from the values of its parts, from the leaves upwards."""
    values: list[T] = []
    for part in reversed(list(subtrees(tree))):
        if isinstance(part, Leaf):
            values.append(leaf(part.node))
        else:
            values.append((series if isinstance(part, Series) else parallel)(take(values, len(part.parts))))
    return values[0]


def take(values: list[T], count: int) -> list[T]:
    """Pop the values of the parts of one tree from the stack; the leftmost was computed last."""
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
    """The weight of the heaviest chain of nodes."""
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
    """The order as a graph without implied edges: they lead from sinks of a part to sources of the next."""
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


OrderedPart: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """For every number its node, and masks of the numbers before it, after it, covered by it and covering it."""

    nodes: tuple[TreeNode, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    below: tuple[OrderedPart, ...]
    above: tuple[OrderedPart, ...]

    @property
    def everything(self) -> OrderedPart:
        return tuple(range(len(self.nodes)))


def order_from(graph: nx.DiGraph) -> Order:
    """The order of an acyclic graph; among nodes that may come next, the one added to the graph first gets the number.

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
    """The mask of all numbers before each one, and its predecessors without those that precede another one."""
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
    """The largest number of pieces such that all of one piece is before all of the next.

    Sorted by the number of nodes before them, the numbers of earlier pieces come first. There is a border wherever all
    pairs across it are ordered.
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


Combine: TypeAlias = Callable[[Sequence[Tree]], Tree]
Prime: TypeAlias = Callable[[OrderedPart], Tree | Sequence[OrderedPart] | None]
"""Treatment of a prime part, which is neither parallel nor consecutive: returns a tree, or pieces to put in series."""


def decompose(graph: nx.DiGraph) -> Tree | None:
    """The series-parallel tree of an acyclic graph; None if its order is not series-parallel.

    Parallel parts are sorted by their first node in a topological order. The worst case, quadratic in the number of
    nodes, is a tree as deep as it has nodes.

    Raises:
        networkx.NetworkXUnfeasible: the graph has a cycle.
        ValueError: the graph has no nodes.
    """
    order = order_from(graph)
    return expand(order, order.everything, lambda part: None)


def expand(order: Order, part: OrderedPart, prime: Prime) -> Tree | None:
    """Divide a part recursively, down to single nodes; None as soon as `prime` has no answer."""
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
    """The way in which the pieces of a part are combined, and the pieces; None for a prime part."""
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
