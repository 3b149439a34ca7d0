"""Divides a stage's backward into the gradients of its inputs (I) and the part that waits (W).

    seeds
      |                   I runs the nodes from which a leaf, an input of the stage, can be reached: the path.
      v     off path      At a product on the path, W computes the gradients of the operands that lead to parameters
    product ------> c     only (see `split_products`), and goes on from there.
      |                   At any other node I computes all gradients. If it leads off the path to products, their
      v     off path      part of the graph is W's from the first node c on where it can be cut, which is one that saved
    other --------> c     nothing and so may run twice: in I only to catch the gradient. Nodes before it join the path.
      |                   What leads to parameters without a product stays in I.
      v
     leaf                 Roots from which no leaf can be reached are W's.

Parameters that W reaches from several places get all their gradients in one call of autograd, in the order of a full
backward, so that additions are the same and hooks fire once. Parameters that I reaches, too, are left to I, and so are
those with gradients partly from products and partly through other nodes of W.

The graphs of micro-batches have the same structure, for which a plan is made once. It names nodes by their number in
the walk, roots by their position. `follow` walks a graph that is expected to have a known structure.

Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from lightning_gpp._compat.torch import saves_tensors
from lightning_gpp.runtime.split_products import PRODUCTS, is_open

PARAMETER: Final = "AccumulateGrad"
"""Class of the nodes that add to the gradient of a tensor."""

Signature = tuple[list[type], list[list[int]], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of one micro-batch, numbered in the order of a walk from the roots.

    Attributes:
        children: numbers of the nodes to which each node passes gradients; -1 for none.
        roots: node of every root.
        leaves: node of every leaf that can be reached.
    """

    nodes: list[Node]
    children: list[list[int]]
    roots: list[int]
    leaves: list[int]

    def signature(self) -> Signature:
        """Equal for graphs of the same structure."""
        return list(map(type, self.nodes)), self.children, self.roots, self.leaves


def walk(roots: Iterable[Node], leaves: Iterable[Node]) -> Graph:
    """Number all nodes that can be reached."""
    roots = list(roots)
    nodes = list(dict.fromkeys(roots))
    numbers = {node: number for number, node in enumerate(nodes)}
    children: list[list[int]] = []
    for node in nodes:  # which grows
        mine: list[int] = []
        for child, _ in node.next_functions:
            if child is None:
                mine.append(-1)
                continue
            number = numbers.get(child)
            if number is None:
                number = numbers[child] = len(nodes)
                nodes.append(child)
            mine.append(number)
        children.append(mine)
    reached = [numbers[node] for node in leaves if node in numbers]
    return Graph(nodes, children, [numbers[node] for node in roots], reached)


def follow(signature: Signature, roots: Sequence[Node], leaves: Sequence[Tensor]) -> list[Node] | None:
    """The nodes of a walk if the graph has this structure, otherwise None. This runs for every micro-batch."""
    types, children, root_numbers, leaf_numbers = signature
    nodes = list(dict.fromkeys(roots))
    if len(roots) != len(root_numbers) or [nodes.index(root) for root in roots] != root_numbers:
        return None
    count = len(nodes)
    for node, mine in zip(nodes, children, strict=False):  # the first of which grows
        functions = node.next_functions
        if len(functions) != len(mine):
            return None
        for position, number in enumerate(mine):
            child = functions[position][0]
            if number == count and child is not None:
                nodes.append(child)
                count += 1
            elif number == count or child is not (None if number < 0 else nodes[number]):
                return None
    found = set(nodes)
    same = len(found) == count and list(map(type, nodes)) == types
    return nodes if same and _reaches([nodes[number] for number in leaf_numbers], leaves, found) else None


def _reaches(expected: Sequence[Any], leaves: Sequence[Tensor], found: set[Node]) -> bool:
    """True if these are the nodes of the leaves."""
    if len(expected) == len(leaves):
        return all(getattr(node, "variable", None) is leaf for node, leaf in zip(expected, leaves, strict=True))
    return [node for node in map(node_of, leaves) if node in found] == expected


def node_of(leaf: Tensor) -> Node:
    """The node that adds to the gradient of a leaf."""
    return get_gradient_edge(leaf).node


@dataclass(slots=True, kw_only=True)
class ProductGroup:
    """The work of one call of autograd in W.

    Attributes:
        parameters: the parameters that it reaches.
        products: nodes, each with the indices of its gradients that wait.
        cuts: nodes from which it continues with the gradients that arrived there.
        roots: positions of the roots that it starts from.
    """

    parameters: set[int]
    products: list[tuple[int, list[int]]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)

    def add(self, other: ProductGroup) -> None:
        self.parameters |= other.parameters
        self.products += other.products
        self.cuts += other.cuts
        self.roots += other.roots


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The division of a backward into I and W.

    Attributes:
        roots: positions of the roots that I starts from.
        targets: nodes that I has to reach, besides the leaves.
        groups: the calls of W.
        closed: products that are not open (see `is_open`); the plan is valid only for graphs with the same ones.
    """

    roots: tuple[int, ...]
    targets: tuple[int, ...]
    groups: tuple[ProductGroup, ...]
    closed: tuple[int, ...]


def closed_products(nodes: Sequence[Node], products: Iterable[int]) -> tuple[int, ...]:
    return tuple(number for number in products if not is_open(nodes[number]))


def products_of(graph: Graph) -> list[int]:
    return [number for number, node in enumerate(graph.nodes) if type(node).__name__ in PRODUCTS]


def make_plan(graph: Graph, closed: tuple[int, ...]) -> SplitPlan:
    """Divide the work of a full backward into I and W."""
    planner = _Planner(graph, closed)
    for number in planner.parents_first:
        planner.visit(number)
    groups = planner.groups()
    later = {position for group in groups for position in group.roots}
    waiting = set[int]().union(*(group.parameters for group in groups))
    starts = {number for group in groups for number in (*group.cuts, *(number for number, _ in group.products))}
    return SplitPlan(
        roots=tuple(position for position in range(len(graph.roots)) if position not in later),
        targets=(*sorted(planner.early - waiting), *sorted(starts - planner.path)),
        groups=tuple(groups),
        closed=closed,
    )


class _Planner:
    """Visits the nodes of a graph, each after all nodes that pass gradients to it."""

    def __init__(self, graph: Graph, closed: tuple[int, ...]) -> None:
        self._nodes, self._roots = graph.nodes, graph.roots
        self._children = [[child for child in children if child >= 0] for children in graph.children]
        self._operands = graph.children
        self._closed = set(closed)
        self.parents_first = _parents_first(self._children)
        self.path, self._parameters, self._has_product = self._reached(graph.leaves)
        self.early: set[int] = set()
        self._in_input = set[int]()  # nodes that get gradients from nodes of I
        self._in_weight, self._started = set[int](), set[int]()  # nodes with gradients from W; where W starts
        self._groups: list[ProductGroup] = []

    def _reached(self, leaves: Iterable[int]) -> tuple[set[int], list[frozenset[int]], list[bool]]:
        """The path, and for all other nodes the parameters that they reach, and whether they do through a product."""
        path = set(leaves)
        parameters = [frozenset[int]()] * len(self._nodes)
        has_product = [False] * len(self._nodes)
        for number in reversed(self.parents_first):
            children = self._children[number]
            if path.intersection(children):
                path.add(number)
            elif number not in path:
                own = {number} if type(self._nodes[number]).__name__ == PARAMETER else set()
                parameters[number] = frozenset(own).union(*(parameters[child] for child in children))
                has_product[number] = self._is_product(number) or any(has_product[child] for child in children)
        return path, parameters, has_product

    def visit(self, number: int) -> None:
        """Decide which part a node belongs to, and so in which part its children get gradients."""
        if number in self.path:
            self._pass_on(number, waiting=set(self._off_path(number)) if self._is_product(number) else set())
        elif number in self._in_weight or number in self._started:
            sources = [where for where in (self._in_weight, self._started, self._in_input) if number in where]
            if len(sources) > 1 or number in self._roots:  # these would be added in another order
                self.early |= self._parameters[number]
            self._in_weight.update(self._children[number])
        elif number in self._roots and number not in self._in_input:
            positions = [position for position, root in enumerate(self._roots) if root == number]
            self._groups.append(ProductGroup(parameters=set(self._parameters[number]), roots=positions))
            self._in_weight.update(self._children[number])
        elif number in self._in_input:
            self._enter(number)

    def _enter(self, number: int) -> None:
        """Handle a node off the path at which gradients arrive in I."""
        if not self._has_product[number]:
            self.early |= self._parameters[number]
        elif not self._saves(number):
            self._groups.append(ProductGroup(parameters=set(self._parameters[number]), cuts=[number]))
            self._in_weight.update(self._children[number])
        else:
            children = self._off_path(number) if self._is_product(number) else []
            self._pass_on(number, waiting={child for child in children if not self._has_product[child]})

    def _pass_on(self, number: int, waiting: set[int]) -> None:
        """Let I run a node; the gradients of some of its children wait."""
        if waiting:
            operands = [i for i, child in enumerate(self._operands[number]) if child in waiting]
            parameters = set[int]().union(*(self._parameters[child] for child in waiting))
            self._groups.append(ProductGroup(parameters=parameters, products=[(number, operands)]))
        self._started |= waiting
        self._in_input.update(child for child in self._off_path(number) if child not in waiting)

    def groups(self) -> list[ProductGroup]:
        """The groups of W, which share no parameter with I, nor with each other."""
        groups: list[ProductGroup] = []
        for group in self._groups:
            shares = [other for other in groups if other.parameters & group.parameters]
            merged = ProductGroup(parameters=set())
            for one in (*shares, group):
                merged.add(one)
            groups = [other for other in groups if other not in shares] + [merged]
        for group in groups:
            if group.parameters & self.early:
                self.early |= group.parameters
        return [group for group in groups if group.parameters and not group.parameters & self.early]

    def _off_path(self, number: int) -> list[int]:
        return [child for child in self._children[number] if self._parameters[child] and child not in self.path]

    def _is_product(self, number: int) -> bool:
        name = type(self._nodes[number]).__name__
        return name in PRODUCTS and number not in self._closed and PRODUCTS[name].fits(self._nodes[number])

    def _saves(self, number: int) -> bool:
        node = self._nodes[number]
        return isinstance(node, BackwardCFunction) or saves_tensors(node)


def _parents_first(children: list[list[int]]) -> list[int]:
    waiting = [0] * len(children)
    for mine in children:
        for child in mine:
            waiting[child] += 1
    order = [number for number, count in enumerate(waiting) if not count]
    for number in order:  # which grows
        for child in children[number]:
            waiting[child] -= 1
            if not waiting[child]:
                order.append(child)
    return order


def runs_reentrant_checkpoints(graph: Graph) -> bool:
    """True if a graph has reentrant checkpoints, which run only in backwards to everything."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph.nodes)
