"""Where a stage's autograd graph is cut: which nodes belong to the gradients of the inputs (I), which to those of the
parameters (W), and at which nodes the gradient is kept for W.

    seeds                 path: nodes from which a leaf (an input of the stage) can be reached. I runs these.
      |                   cut:  W starts here, with the gradient that arrived during I. It is
      n ------> c            n   if n is a product: autograd computes its gradients apart from each other, each with
      | path    | off            a product of its own, so I computes that of the input and W those of the parameters;
      v         v            c   otherwise, if c is more than the way to a parameter: n runs once, in I.
    leaf     parameter    Else the parameter's gradient is computed in I, too.

Why products only. A fused node (a custom `autograd.Function`, a compiled region, a recurrent cell) computes all of its
gradients in one call and would run twice. Norms, scales and biases read what they saved once per gradient: their
parameters' gradients cost little, but would keep their inputs alive until W. The paper's W, too, has only products.

Parameters that several cuts reach stay together: one call of autograd for all of these cuts, so that the gradients
are added in the same order and hooks fire once. Where that call would run a part of the path again (one cut lies behind
another: a weight that is used at several depths), they are computed in I. The graphs of micro-batches are alike: a plan
is made once for a structure, and names nodes by their number in the walk.

Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

PRODUCTS: Final = frozenset(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Mm", "Addmv", "Mv", "Bmm", "Baddbmm", "Addbmm", "Linear", "MkldnnLinear", "GroupedMm", "Trilinear"),
        *("Convolution", "ConvolutionOverrideable", "MiopenConvolution", "MpsConvolution"),
    )
)
"""Nodes that compute only the gradients that are asked for, each by a product of its own."""

WAYS: Final = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze", "Slice"),
        *("Select", "AsStrided", "Alias", "Detach", "Clone", "ToCopy", "Split", "UnsafeSplit", "Unbind"),
    )
) | {"SqueezeBackward1", "AsStridedBackward1"}
"""Nodes that do not compute: what lies between a parameter and its use."""

PARAMETER: Final = "AccumulateGrad"
"""Class of the nodes that add to the gradient of a tensor."""

WHOLE: Final = {
    "CheckpointFunctionBackward": "it has reentrant activation checkpoints, which run only in backwards to everything",
    "CompiledFunctionBackward": "it has a compiled region, which writes over what it saved and so runs only once",
}
"""Classes of nodes that only a full backward can run, each with the reason."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of one micro-batch, numbered in the order of a walk from the roots.

    Attributes:
        children: for every node the numbers of the nodes that it passes gradients to.
        roots: for every root its node.
        leaves: for every leaf that can be reached its node.
    """

    nodes: list[Node]
    children: list[list[int]]
    roots: list[int]
    leaves: list[int]

    def signature(self) -> tuple[list[type], list[list[int]], list[int], list[int]]:
        """Equal for graphs of the same structure."""
        return list(map(type, self.nodes)), self.children, self.roots, self.leaves


def walk(roots: Iterable[Node], leaves: Iterable[Node]) -> Graph:
    """Number all nodes that can be reached. A class for itself: this runs for every micro-batch."""
    roots = list(roots)
    nodes = list(dict.fromkeys(roots))
    numbers = {node: number for number, node in enumerate(nodes)}
    children: list[list[int]] = []
    for node in nodes:  # which grows
        mine: list[int] = []
        for child, _ in node.next_functions:
            if child is not None:
                number = numbers.get(child)
                if number is None:
                    number = numbers[child] = len(nodes)
                    nodes.append(child)
                mine.append(number)
        children.append(mine)
    return Graph(nodes, children, [numbers[node] for node in roots], [numbers[n] for n in leaves if n in numbers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What one call of autograd does in W.

    Attributes:
        cuts: nodes, with the gradients that arrived there in I.
        roots: positions among the roots, with their seeds.
        parameters: nodes of the parameters.
    """

    cuts: tuple[int, ...]
    roots: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What I and W do for graphs of one structure.

    Attributes:
        roots: positions among the roots that I starts from.
        targets: nodes that I must reach, besides the leaves: parameters, and cuts that lie off the path.
        groups: W.
    """

    roots: tuple[int, ...]
    targets: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A place where W could start, and the parameters that it reaches there."""

    cut: int | None = None
    roots: list[int] = field(default_factory=list)
    parameters: frozenset[int]


class _Structure:
    """A graph without its nodes: what can be reached from where."""

    def __init__(self, graph: Graph) -> None:
        self.names = [type(node).__name__ for node in graph.nodes]
        self.functions = {number for number, node in enumerate(graph.nodes) if isinstance(node, BackwardCFunction)}
        self.children, self.roots = graph.children, graph.roots
        self.parents: list[list[int]] = [[] for _ in graph.nodes]
        for number, children in enumerate(graph.children):
            for child in children:
                self.parents[child].append(number)
        self.path: set[int] = set(graph.leaves)
        self.parameters: list[frozenset[int]] = [frozenset()] * len(graph.nodes)
        for number in self._children_first():
            self._reach(number)

    def _reach(self, number: int) -> None:
        children = self.children[number]
        if self.path.intersection(children):
            self.path.add(number)
        elif number not in self.path:
            own = {number} if self.names[number] == PARAMETER else set()
            self.parameters[number] = frozenset(own).union(*(self.parameters[child] for child in children))

    def _children_first(self) -> Iterator[int]:
        waiting = [len(children) for children in self.children]
        ready = [number for number, count in enumerate(waiting) if not count]
        while ready:
            number = ready.pop()
            yield number
            for parent in self.parents[number]:
                waiting[parent] -= 1
                if not waiting[parent]:
                    ready.append(parent)

    def below(self, start: int) -> set[int]:
        """All nodes that get gradients from this one."""
        seen: set[int] = set()
        stack = [start]
        while stack:
            for child in self.children[stack.pop()]:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return seen

    def off_path(self, number: int) -> list[int]:
        """Its children that lead to parameters only."""
        return [child for child in dict.fromkeys(self.children[number]) if self.parameters[child]]

    def can_start(self, number: int) -> bool:
        """Whether W can start at this node off the path, all of whose gradients arrive in I.

        I has to run the node, without asking it for a gradient: a Python function would compute them all the same.
        """
        if number in self.functions or number in self.roots:
            return False
        if any(parent not in self.path or self.names[parent] in PRODUCTS for parent in self.parents[number]):
            return False
        return any(self.names[n] not in WAYS and self.names[n] != PARAMETER for n in (number, *self.below(number)))


def make_plan(graph: Graph) -> Plan:
    """Divide the work of a full backward into I and W."""
    structure = _Structure(graph)
    entries, early = _entries(structure)
    groups: list[Group] = []
    for component in _components(_without(entries, early)):
        parameters = frozenset[int]().union(*(entry.parameters for entry in component))
        if _are_apart(component, structure):
            groups.append(_group(component, parameters))
        else:
            early |= parameters
    cuts = {cut for group in groups for cut in group.cuts}
    later = {position for group in groups for position in group.roots}
    return Plan(
        roots=tuple(position for position in range(len(graph.roots)) if position not in later),
        targets=(*sorted(early), *sorted(cuts - structure.path)),
        groups=tuple(groups),
    )


def _entries(structure: _Structure) -> tuple[list[_Entry], set[int]]:
    """The places where W could start, and the parameters that are left to I."""
    entries: list[_Entry] = []
    early: set[int] = set()
    for number in sorted(structure.path):
        off_path = structure.off_path(number)
        if off_path and structure.names[number] in PRODUCTS:
            parameters = frozenset[int]().union(*(structure.parameters[child] for child in off_path))
            entries.append(_Entry(cut=number, parameters=parameters))
            continue
        for child in off_path:
            if not structure.can_start(child):
                early |= structure.parameters[child]
            elif all(entry.cut != child for entry in entries):
                entries.append(_Entry(cut=child, parameters=structure.parameters[child]))
    _add_roots(structure, entries, early)
    return entries, early


def _add_roots(structure: _Structure, entries: list[_Entry], early: set[int]) -> None:
    """Roots from which no leaf can be reached belong to W, unless gradients come to them from other nodes, too."""
    off_path: dict[int, list[int]] = {}
    for position, number in enumerate(structure.roots):
        if number not in structure.path:
            off_path.setdefault(number, []).append(position)
    for number, positions in off_path.items():
        if structure.parents[number]:
            early |= structure.parameters[number]
        else:
            entries.append(_Entry(roots=positions, parameters=structure.parameters[number]))


def _without(entries: list[_Entry], early: set[int]) -> list[_Entry]:
    """The entries that reach none of the early parameters; what the others reach becomes early."""
    while True:
        lost = [entry for entry in entries if entry.parameters & early]
        if not lost:
            return entries
        early.update(*(entry.parameters for entry in lost))
        entries = [entry for entry in entries if entry not in lost]


def _components(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    """Entries that share parameters, together."""
    components: list[tuple[set[int], list[_Entry]]] = []
    of: dict[int, tuple[set[int], list[_Entry]]] = {}
    for entry in entries:
        merged: tuple[set[int], list[_Entry]] = (set(entry.parameters), [entry])
        for old in {id(of[p]): of[p] for p in entry.parameters if p in of}.values():
            merged[0].update(old[0])
            merged[1][:0] = old[1]
            components.remove(old)
        components.append(merged)
        of.update(dict.fromkeys(merged[0], merged))
    return [members for _, members in components]


def _are_apart(component: Sequence[_Entry], structure: _Structure) -> bool:
    """Whether none of the cuts lies behind another."""
    if len(component) == 1:
        return True
    cuts = {entry.cut for entry in component if entry.cut is not None}
    return not any(cuts & structure.below(cut) for cut in cuts)


def _group(component: Iterable[_Entry], parameters: Iterable[int]) -> Group:
    component = list(component)
    return Group(
        cuts=tuple(entry.cut for entry in component if entry.cut is not None),
        roots=tuple(position for entry in component for position in entry.roots),
        parameters=tuple(sorted(parameters)),
    )


def needs_full_backward(graph: Graph) -> str | None:
    """The reason, if there is one."""
    return next((WHOLE[name] for name in (type(node).__name__ for node in graph.nodes) if name in WHOLE), None)
