"""A recorded stage: the records of its actions for one micro-batch as one step of autograd, and what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpp._compat.torch import as_result, buffers_of, checkpoint_regions, parameters_of
from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.boundary import DTYPES
from lightning_gpp.runtime.split import SplitBackward, Splitter
from lightning_gpp.runtime.stage import MicroBatch, Recordable, Slot, StageWrapper
from lightning_gpp.schedules.actions import Kind

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})

Repeat = Callable[[], object]
"""Repeats what was recorded."""


class Recorder(Protocol):
    """Records launches. Records of one recorder are repeated in the order in which they were made.

    Attributes:
        draws_apart: whether records of recorders that are apart may draw random numbers at the same time.
    """

    draws_apart: bool

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for values that come from outside; call it inside a record."""
        ...

    def record(self, work: Callable[[], object]) -> Repeat:
        """Record `work`, which takes no effect."""
        ...

    def apart(self) -> Recorder:
        """A recorder for records that are repeated at the same time as this one's."""
        ...

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory, which the result does not keep from being used by later records."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    """A record of a forward. `learn`: names of the results that have gradients."""

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    learn: frozenset[str]
    repeat: Repeat


class RecordedStage(StageWrapper):
    """A stage for one micro-batch, computed as always until it is recorded. The user's step is not recorded.

    Args:
        stage: the stage.
        slots: the tensors that it gets.
        num_samples: samples of the micro-batch.
    """

    stage: Recordable
    runs_again = False
    """True if the forward is recomputed."""

    def __init__(self, stage: Recordable, slots: Iterable[Slot], num_samples: int) -> None:
        super().__init__(stage)
        self._slots, self._num_samples = {slot.name: slot for slot in slots}, num_samples
        self._token = torch.zeros((), requires_grad=True)
        self.forget()

    def forget(self) -> None:
        """Drop the records."""
        self._runs: list[_Run] = []
        self._turn = 0
        self._open: tuple[dict[str, Tensor], dict[str, GradientEdge]] | None = None
        self._split: SplitBackward | None = None
        self._seeds: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._backward: Repeat | None = None
        self._weights: Repeat | None = None

    def begin(self) -> None:
        """Prepare for a mini-batch."""
        self._turn = 0

    # --- at run time

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The results of the stage; a stage that is recomputed has a record for each of its two forwards."""
        if not self._runs:
            return self.stage.forward(values, micro_batch)
        run = self._runs[self._turn % len(self._runs)]
        self._turn += 1
        given = [values[name] for name in run.inputs]
        results: Sequence[Tensor] = _Repeated.apply(self, run, self._token, *given)  # type: ignore[no-untyped-call]
        return self.stage.with_step(micro_batch, values, dict(zip(run.results, results, strict=True)))

    def repeat_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, from those of the results that have some."""
        assert self._backward is not None
        for seed, gradient in zip(self._seeds, gradients, strict=True):
            seed.zero_() if gradient is None else seed.copy_(gradient)
        self._backward()
        return [None if gradient is None else gradient.clone() for gradient in self._gradients]

    def repeat_weights(self) -> None:
        """Add the gradients of the parameters that a split backward left."""
        if self._weights is not None:
            self._weights()

    # --- recording

    def record(self, kind: Kind, recorder: Recorder) -> None:
        """Record an action, after those before it."""
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            self._runs.append(self._recorded_forward(recorder))
        elif kind is Kind.WEIGHT:
            assert self._split is not None
            self._weights, self._split = recorder.record(self._split.weight_gradients), None
        else:
            self._record_backward(recorder, kind is Kind.INPUT)

    def _recorded_forward(self, recorder: Recorder) -> _Run:
        buffers: dict[str, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        results: dict[str, Tensor] = {}

        def work() -> None:
            for name, slot in self._slots.items():
                buffers[name] = recorder.buffer(slot.spec.sizes(self._num_samples), DTYPES[slot.spec.dtype])
                leaf = leaves[name] = buffers[name].detach().requires_grad_(slot.spec.requires_grad)
                values[name] = as_result(leaf, leaf.shape) if leaf.requires_grad else leaf
            with checkpoint_regions(_refuse_checkpoints, _leave):
                results.update(self.stage.compute(values, self._num_samples))

        repeat = recorder.record(work)
        edges = {name: get_gradient_edge(result) for name, result in results.items() if result.requires_grad}
        is_last = len(self._runs) == self.runs_again  # only the graph of the last forward is kept for the backward
        self._open = (leaves, edges) if is_last else None
        return _Run(
            {name: recorder.unowned(buffer) for name, buffer in buffers.items()},
            {name: recorder.unowned(result) for name, result in results.items()},
            frozenset(edges),
            repeat,
        )

    def _record_backward(self, recorder: Recorder, split: bool) -> None:
        assert self._open is not None
        (leaves, edges), results = self._open, self._runs[-1].results
        self._open = None
        self._split = SplitBackward(Splitter()) if split else None
        seeds: list[Tensor] = []

        def work() -> None:
            seeds.extend(recorder.buffer(results[name].shape, results[name].dtype) for name in edges)
            self._differentiate(list(edges.values()), seeds, leaves)

        self._backward = recorder.record(work)
        self._seeds = [recorder.unowned(seed) for seed in seeds]
        gradients = [leaf.grad for leaf in leaves.values()]
        self._gradients = [None if gradient is None else recorder.unowned(gradient) for gradient in gradients]

    def _differentiate(self, roots: list[GradientEdge], seeds: list[Tensor], leaves: Mapping[str, Tensor]) -> None:
        if self._split is not None:
            self._split.input_gradients(
                roots, seeds, {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            )
        elif roots:
            torch.autograd.backward(roots, seeds)


def _refuse_checkpoints() -> None:
    raise GPPError("activation checkpoints set the state of the random numbers, which a record cannot do")


def _leave() -> None:
    """Nothing: no checkpoint is entered."""


class _Repeated(torch.autograd.Function):
    """The recorded forward of a stage as one step of autograd. `token` needs a gradient, whatever the inputs do."""

    @staticmethod
    def forward(ctx: Any, stage: RecordedStage, run: _Run, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.stage, ctx.learns = stage, [name in run.learn for name in run.results]
        ctx.set_materialize_grads(False)
        for buffer, given in zip(run.inputs.values(), inputs, strict=True):
            buffer.copy_(given)
        run.repeat()
        results = tuple(result.clone() for result in run.results.values())
        ctx.mark_non_differentiable(*(r for r, learns in zip(results, ctx.learns, strict=True) if not learns))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        wanted = [gradient for gradient, learns in zip(gradients, ctx.learns, strict=True) if learns]
        return None, None, None, *ctx.stage.repeat_backward(wanted)


def lengths_of(module: nn.Module) -> dict[str, int]:
    """The lengths of a module's lists, dictionaries and sets."""
    return {name: len(value) for name, value in vars(module).items() if isinstance(value, (list, dict, set))}


def form_of(module: nn.Module) -> tuple[Any, ...]:
    """The values of a module's own attributes that are plain, and the memory of its tensors.

    This runs for every module in every mini-batch.
    """
    own = vars(module)
    plain = [value for value in own.values() if type(value) in _PLAIN]
    tensors = [id(value) for value in own.values() if type(value) is Tensor]
    states = [each for table in (parameters_of(module), buffers_of(module)) if table for each in table.values()]
    memory = [(each.data_ptr(), each.requires_grad) for each in states if each is not None]
    return len(own), plain, tensors, memory
