"""The split of a stage's backward into I, the gradients of its inputs, which other stages wait for, and W, the
gradients of its parameters, which only the optimizer waits for. Both together do what a full backward does: the same
additions in the same order, every hook of a parameter once.

`Splitter` holds what was learned about a stage; `SplitBackward` is one micro-batch:

    split = SplitBackward(splitter)
    with split.watching():
        outputs = forward(inputs)
    split.input_gradients(roots, seeds, leaves)     # I: leaf.grad of every leaf
    ...                                             # other micro-batches
    split.weight_gradients()                        # W: parameter.grad

Hooks on an intermediate tensor that a product (`split_plan.PRODUCTS`) made fire in I and again in W, where what they
return has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.split_plan import Graph, Group, Plan, make_plan, needs_full_backward, walk
from lightning_gpp.runtime.split_saved import Reads, SavedTensors

MAX_STRUCTURES: Final = 16
"""Structures of graphs that are remembered per stage; a plan takes milliseconds to make."""

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Learned:
    """What is known about graphs of one structure."""

    signature: object
    plan: Plan
    reads: Reads | None = None
    is_new: bool = True


class Splitter:
    """What was learned about the graph of one stage.

    Args:
        frees: free in I what W does not need. Hooks on saved tensors do this, and `torch.func.grad` and its relatives
            refuse to run inside such hooks. Without, all of it stays until W.

    Attributes:
        splits: False if I has been found to do all of the work. May become so with a micro-batch; W then is empty.
        reason: why it does not split.
    """

    def __init__(self, *, frees: bool = True) -> None:
        self.frees = frees
        self.reason: str | None = None
        self._learned: list[_Learned] = []

    @property
    def splits(self) -> bool:
        return self.reason is None

    def refuse(self, reason: str) -> None:
        """Do not split from now on."""
        self.reason = reason

    def learn(self, graph: Graph) -> _Learned | None:
        """What is known about graphs of this structure; None if the stage cannot be split."""
        signature = graph.signature()
        for learned in self._learned:
            if learned.signature == signature:
                return learned
        self.reason = needs_full_backward(graph)
        if not self.splits:
            return None
        self._learned = self._learned[1 - MAX_STRUCTURES :]
        self._learned.append(_Learned(signature=signature, plan=make_plan(graph)))
        return self._learned[-1]


class _Slot:
    """Catches the gradients that arrive at a node in I, and lets them arrive there again in W, whatever the hooks of
    the user do before it. Knows no node: a node's hook that did would keep the node alive."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: Gradients | None = None

    def __call__(self, gradients: Gradients) -> Gradients | None:
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """One call of autograd in W."""

    cuts: list[tuple[Node, _Slot]]
    roots: list[GradientEdge]
    seeds: list[Tensor]
    parameters: list[GradientEdge]

    def run(self) -> None:
        roots, seeds = self.roots, self.seeds
        for node, slot in self.cuts:
            for number, gradient in enumerate(slot.gradients or ()):
                if gradient is not None:
                    roots.append(GradientEdge(node, number))
                    seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds, inputs=self.parameters)
        self.clear()

    def clear(self) -> None:
        for _, slot in self.cuts:
            slot.gradients = None


class SplitBackward:
    """The backward of one micro-batch of a stage; can be used again for the next one."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._saved: SavedTensors | None = None
        self._learned: _Learned | None = None
        self._waiting: list[_Waiting] = []

    def watching(self) -> AbstractContextManager[object]:
        """The context for the forward.

        Raises:
            GPPError: the forward uses torch.func, which excludes freeing.
        """
        self.clear()
        if not (self._splitter.frees and self._splitter.splits):
            return nullcontext()
        self._saved = SavedTensors()
        return _Watching(self._saved)

    def input_gradients(
        self, roots: Sequence[GradientEdge], seeds: Sequence[Tensor], leaves: Mapping[str, Tensor]
    ) -> None:
        """I: what `torch.autograd.backward(roots, seeds)` leaves in the `.grad` of the leaves, and in that of the
        parameters whose gradients do not wait for W."""
        graph = self._graph(roots, leaves)
        learned = None if graph is None else self._splitter.learn(graph)
        if graph is None or learned is None or not learned.plan.groups:
            self._full_backward(roots, seeds)
            return
        plan = learned.plan
        self._learned = learned
        self._waiting = [_waiting(group, graph, roots, seeds) for group in plan.groups]
        targets = [*leaves.values(), *(GradientEdge(graph.nodes[number], 0) for number in plan.targets)]
        self._run_input(_call([roots[i] for i in plan.roots], [seeds[i] for i in plan.roots], targets), learned)

    def weight_gradients(self) -> None:
        """W: add to the parameters' `.grad` what I did not."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            waiting.pop().run()
        learned, saved = self._learned, self._saved
        if learned is not None and saved is not None and not (learned.reads and saved.fit(learned.reads)):
            learned.reads = saved.reads()
        self.clear()

    def clear(self) -> None:
        """Drop every tensor."""
        for waiting in self._waiting:
            waiting.clear()
        self._saved, self._learned, self._waiting = None, None, []

    def _graph(self, roots: Sequence[GradientEdge], leaves: Mapping[str, Tensor]) -> Graph | None:
        """None where nothing can be split."""
        if not (self._splitter.splits and leaves and roots):
            return None
        return walk((root.node for root in roots), (get_gradient_edge(leaf).node for leaf in leaves.values()))

    def _full_backward(self, roots: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> None:
        if self._saved is not None:
            self._saved.release()
        self._saved = None
        if roots:
            torch.autograd.backward(roots, seeds)

    def _run_input(self, run: Callable[[], None], learned: _Learned) -> None:
        saved = self._saved
        if saved is not None:
            saved.begin_input(learned.reads)
        if learned.is_new or not (saved is None or learned.reads is None or saved.fit(learned.reads)):
            learned.is_new = False
            self._run_and_look(run)
        else:
            run()
        if saved is not None:
            saved.end_input()
        if not self._splitter.splits:
            self.weight_gradients()

    def _run_and_look(self, run: Callable[[], None]) -> None:
        with torch.no_grad(), _Forwards() as forwards:
            run()
        if forwards.seen:
            self._splitter.refuse("it recomputes activations in its backward (checkpoints), and would do so in I and W")


def _call(roots: list[GradientEdge], seeds: list[Tensor], targets: list[Any]) -> Callable[[], None]:
    def run() -> None:
        if roots:
            torch.autograd.backward(roots, seeds, inputs=targets, retain_graph=True)

    return run


def _waiting(group: Group, graph: Graph, roots: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> _Waiting:
    cuts = []
    for number in group.cuts:
        node, slot = graph.nodes[number], _Slot()
        node.register_prehook(slot)
        cuts.append((node, slot))
    return _Waiting(
        cuts=cuts,
        roots=[roots[position] for position in group.roots],
        seeds=[seeds[position] for position in group.roots],
        parameters=[GradientEdge(graph.nodes[number], 0) for number in group.parameters],
    )


class _Forwards(TorchDispatchMode):
    """Notices operators that run with gradients enabled, which in a backward only those of a second forward do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


class _Watching:
    """Hooks on saved tensors, with an error that says where they come from."""

    def __init__(self, saved: SavedTensors) -> None:
        self._hooks = saved.hooks()

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._hooks.__exit__()
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise GPPError(
                f"A stage whose backward is split watches what its forward saves, and this forward refuses: {error} "
                "Use a schedule without split backwards, or leave this stage out of them."
            ) from error
