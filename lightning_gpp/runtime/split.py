"""The split of a stage's backward into I, the gradients of its inputs, which other stages wait for, and W, the
gradients of its parameters, which only the optimizer waits for. Both together do what a full backward does: the same
additions in the same order, every hook of a parameter once.

`Splitter` has the plans of a stage's graphs; `SplitBackward` is one micro-batch:

    split.input_gradients(roots, seeds, leaves)     # I: leaf.grad of every leaf
    ...                                             # other micro-batches
    split.weight_gradients()                        # W: parameter.grad

I is an ordinary backward that stops at the leaves, and frees the graph as it goes. Before it, W's operands are taken
out of the graph; during it, the gradients that belong to them are caught. Only these stay between I and W: for a layer
of a transformer the 32sbh of the Zero Bubble paper (arXiv 2401.10241, table 1). Nothing is computed twice, so
checkpoints, compiled regions and custom functions are no obstacle: their contents belong to I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_gpp._compat.torch import run_backward
from lightning_gpp.runtime.split_plan import (
    Graph,
    ProductGroup,
    Signature,
    SplitPlan,
    closed_products,
    follow,
    make_plan,
    node_of,
    products_of,
    runs_reentrant_checkpoints,
    walk,
)
from lightning_gpp.runtime.split_products import Later

MAX_STRUCTURES: Final = 16
"""Number of graph structures to remember per stage; a plan takes milliseconds to make."""

ENOUGH: Final = 1 << 20
"""Elements of gradients that are worth a call of autograd: a call costs tens of microseconds, and while it runs its
gradients are in memory besides the `.grad` that they are added to.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """A structure of graphs, its products and its plan."""

    signature: Signature
    products: list[int]
    plan: SplitPlan

    def fits(self, nodes: Sequence[Node]) -> bool:
        """True if the same products are open in a graph of this structure."""
        return closed_products(nodes, self.products) == self.plan.closed


class Splitter:
    """Plans of split backwards, learned from the graphs of one stage.

    Attributes:
        reason: why I does all the work, as found at a micro-batch; None if it does not.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._known: list[_Known] = []  # the latest last

    @property
    def splits(self) -> bool:
        """False if I was found to do all the work."""
        return self.reason is None

    def plan(self, roots: Sequence[Node], leaves: Sequence[Tensor]) -> tuple[list[Node], SplitPlan | None]:
        """The nodes of a graph and its plan; None if nothing can wait."""
        if self._known:
            latest = self._known[-1]
            nodes = follow(latest.signature, roots, leaves)
            if nodes is not None and latest.fits(nodes):
                return nodes, latest.plan if latest.plan.groups else None
        graph = walk(roots, map(node_of, leaves))
        return graph.nodes, self._found(graph)

    def _found(self, graph: Graph) -> SplitPlan | None:
        """The plan of a structure that was not the latest."""
        signature = graph.signature()
        for known in self._known:
            if known.signature == signature and known.fits(graph.nodes):
                self._known.remove(known)
                self._known.append(known)
                return known.plan if known.plan.groups else None
        return self._learn(graph, signature)

    def _learn(self, graph: Graph, signature: Signature) -> SplitPlan | None:
        if runs_reentrant_checkpoints(graph):
            self.reason = "it has reentrant activation checkpoints, which run only in a full backward"
            return None
        products = products_of(graph)
        plan = make_plan(graph, closed_products(graph.nodes, products))
        self._known = [*self._known[1 - MAX_STRUCTURES :], _Known(signature=signature, products=products, plan=plan)]
        self.reason = None if plan.groups else _without_products(graph)
        return plan if plan.groups else None


def _without_products(graph: Graph) -> str:
    if any(type(node).__name__ == "CompiledFunctionBackward" for node in graph.nodes):
        return "torch.compile made one step of its backward, which computes all gradients at once"
    return "it has no product of an input with a parameter whose gradient can wait"


class _Waiting:
    """The input of one call of autograd in W.

    The hooks that catch gradients are kept by nodes and know no nodes of the path: the graph can go after I.
    """

    def __init__(
        self, group: ProductGroup, nodes: Sequence[Node], roots: Sequence[GradientEdge], seeds: Sequence[Tensor]
    ) -> None:
        self._arrived: list[Later] = []  # in the order of the backward, which is that of the additions
        for number, wanted in group.products:
            node = nodes[number]
            node.register_prehook(_catch(Later(node, wanted), self._arrived))
        self._cuts: list[tuple[Node, list[Tensor | None]]] = []
        for number in group.cuts:
            caught: list[Tensor | None] = []
            nodes[number].register_prehook(_catch_all(caught))
            self._cuts.append((nodes[number], caught))
        self._roots = [roots[position] for position in group.roots]
        self._seeds = [seeds[position] for position in group.roots]

    def compute(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges at which the backward continues, and their gradients. Call it once."""
        edges, gradients = self._roots, self._seeds
        for node, caught in self._cuts:
            for number, gradient in enumerate(caught):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        for later in self._arrived:
            edges += later.edges
            gradients += later.compute()
        return edges, gradients


def _catch(later: Later, arrived: list[Later]) -> Callable[[tuple[Tensor | None, ...]], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        later.gradient = gradients[0]
        if later.gradient is not None:
            arrived.append(later)

    return hook


def _catch_all(caught: list[Tensor | None]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    """A hook that replaces gradients by the caught ones, because W passes the same node, with all its hooks, again."""

    def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if not caught:
            caught.extend(gradients)
        return tuple(caught)

    return hook


class SplitBackward:
    """The backward of one micro-batch of a stage; reusable for the next one."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._waiting: list[_Waiting] = []

    def input_gradients(
        self, roots: Sequence[GradientEdge], seeds: Sequence[Tensor], leaves: Mapping[str, Tensor]
    ) -> None:
        """Compute I: the `.grad` of the leaves, as after `torch.autograd.backward(roots, seeds)`, and of the parameters
        whose gradients do not wait; without leaves of all parameters.

        The graph is freed once the caller drops the roots.
        """
        if not roots:
            return
        inputs = list(leaves.values())
        nodes, plan = self._splitter.plan([root.node for root in roots], inputs) if inputs else ([], None)
        if plan is None:
            del nodes
            run_backward(roots, seeds)
            return
        self._waiting = [_Waiting(group, nodes, roots, seeds) for group in plan.groups]
        targets: list[Tensor | GradientEdge] = [*inputs, *(GradientEdge(nodes[number], 0) for number in plan.targets)]
        if plan.roots:
            del nodes
            run_backward([roots[i] for i in plan.roots], [seeds[i] for i in plan.roots], targets)

    def weight_gradients(self) -> None:
        """Compute W: add the remaining gradients to the parameters' `.grad`.

        Raises:
            GPPError: an operand was changed in place since the forward.
        """
        waiting = self._waiting[::-1]
        self.clear()
        with torch.no_grad():
            self._run(waiting)

    def _run(self, waiting: list[_Waiting]) -> None:
        while waiting:
            edges: list[GradientEdge] = []
            gradients: list[Tensor] = []
            size = 0
            while waiting and size < ENOUGH:
                more_edges, more_gradients = waiting.pop().compute()
                edges += more_edges
                gradients += more_gradients
                size += sum(gradient.numel() for gradient in more_gradients)
            if edges:
                run_backward(edges, gradients)

    def clear(self) -> None:
        """Drop every tensor."""
        self._waiting = []
