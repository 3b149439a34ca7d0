"""Stages of a built pipeline, and the user's step, which they run on micro-batches of open mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import COMPILED_IN_PLACE, pytree
from lightning_gpp.capture.attributes import Attribute
from lightning_gpp.capture.batch import UNCOUNTED, BatchDims, Samples, device_of, samples_in
from lightning_gpp.capture.captured import loss_of
from lightning_gpp.capture.items import are_plain
from lightning_gpp.errors import CaptureError
from lightning_gpp.runtime.random import seed_streams, undisturbed
from lightning_gpp.runtime.stage import LOSS, MicroBatch, Recordable, StageModule, StageWrapper
from lightning_gpp.stages.counts import Counted, scaled, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A call of the user's step that lacks its samples.

    Args:
        function: the user's method.
        rest: its arguments after the samples.
        around: entered around each call, with the number of samples and what they count for, see `counts.share`.
        sums: whether the loss is a sum over samples; it is divided by their number, because the pipeline weights means.
        counted: by which entries samples count, if they do not count the same.
        empty: whether there are none, but other mini-batches of the optimizer step may have some.
        skips: whether a training step may return None, and its micro-batch adds nothing then.
    """

    function: Callable[..., Any]
    rest: Sequence[Any] = ()
    around: Callable[[int, float], AbstractContextManager[Any]] = lambda *_: nullcontext()
    sums: bool = False
    counted: Counted | None = None
    empty: bool = False
    skips: bool = False

    def __call__(self, samples: Any, num_samples: int, share: float) -> Any:
        with self.around(num_samples, share):
            return self.function(samples, *self.rest)

    def factor(self, num_samples: int, share: float) -> float:
        """The factor that makes the loss of a training step a mean over samples."""
        if self.empty:
            return 0.0
        return 1 / num_samples if self.sums else share / num_samples


@dataclass(slots=True, kw_only=True)
class OpenBatch:
    """A mini-batch on which the user's step runs.

    `counts`: what each counts; None if they count the same. `share`: the samples that it counts for as a micro-batch of
    another mini-batch.
    `outputs`: the step's results for each micro-batch.
    """

    samples: Samples
    device: torch.device
    invocation: Invocation
    seed: int
    counts: Sequence[float] | None = None
    share: float | None = None
    outputs: list[tuple[MicroBatch, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class StepRunner:
    """Runs the user's step on micro-batches: of one mini-batch, or of several that are open at the same time."""

    module: nn.Module
    returns_loss: bool
    dims: BatchDims = field(default_factory=dict)
    _open: dict[int, OpenBatch] = field(default_factory=dict)
    _users_streams: ExitStack = field(default_factory=ExitStack)
    _numpys: np.random.BitGenerator = field(default_factory=np.random.MT19937, init=False)
    _lists: dict[int, Any] = field(default_factory=dict)
    """Lists of the present micro-batch that have items of samples which are no tensors, by identity."""

    @property
    def outputs(self) -> list[tuple[MicroBatch, Any]]:
        """The outputs of the step on the micro-batches of the only mini-batch."""
        return self._open[0].outputs if self._open else []

    def begin(
        self,
        batch: Any,
        invoke: Callable[[Any], Any] | Invocation,
        seed: int,
        total: int | None = None,
        share: float | None = None,
    ) -> None:
        """Take this replica's mini-batch of `total` samples. `invoke(samples)` calls the user's step; `seed` starts its
        random streams. `share`: see `open`.
        """
        self.end()
        invocation = invoke if isinstance(invoke, Invocation) else Invocation(function=invoke)
        self.open(0, batch, invocation, seed, total, share)
        self._users_streams.enter_context(undisturbed(self._numpys))

    def end(self) -> None:
        """Release the mini-batch, and restore the user's random streams."""
        self._users_streams.close()
        self._open = {}

    def open(
        self,
        lane: int,
        batch: Any,
        invocation: Invocation,
        seed: int,
        total: int | None = None,
        share: float | None = None,
    ) -> None:
        """Take another mini-batch, besides those that are open; micro-batches name its lane.

        `share`: the samples that it counts for, if it is a micro-batch of another one.
        """
        self._note_batch()
        total = samples_in(batch, self.dims) if total is None else total
        counts = self._counts(batch, invocation, total) if share is None else None
        self._open[lane] = OpenBatch(
            samples=Samples(batch, total, self.dims),
            device=device_of(batch),
            invocation=invocation,
            seed=seed,
            counts=counts,
            share=share,
        )

    def _note_batch(self) -> None:
        """Take note of another mini-batch; one that was in its lane is over."""

    def _counts(self, batch: Any, invocation: Invocation, total: int) -> Sequence[float] | None:
        """Counts of the samples; in evaluation they count the same if the mini-batch lacks the entries."""
        if invocation.counted is None or self.dims == UNCOUNTED:
            return None
        counts = invocation.counted.of_samples(batch, total, self.dims)
        if counts is None and self.returns_loss:
            raise invocation.counted.missing(batch, total, self.dims)
        return counts

    def share(self, micro_batch: MicroBatch) -> float:
        """The samples that a micro-batch counts for."""
        entry = self._open[micro_batch.lane]
        if entry.share is not None:
            return entry.share
        counts = entry.counts
        return micro_batch.num_samples if counts is None else share(counts, micro_batch.start, micro_batch.stop)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, mini-batches may be opened; then all are dropped, and the user's random streams restored."""
        self.end()
        try:
            with undisturbed(self._numpys):
                yield
        finally:
            self.end()

    def close(self, lane: int) -> list[tuple[MicroBatch, Any]]:
        """Drop one mini-batch; returns the outputs of the step on its micro-batches."""
        return self._open.pop(lane).outputs

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Run the step up to its network calls, and return their tensors by slot name."""
        raise TypeError(f"{type(self).__name__} does not compute the inputs of the network.")

    def run(self, micro_batch: MicroBatch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the step, with what other stages have computed for it. Returns `{LOSS: loss}` in training."""
        return self.finish(micro_batch, self.call(micro_batch), self.module.parameters())

    def whole(self, micro_batch: MicroBatch) -> Any:
        """Run the unsplit step with its modules and return its result. Draws the same random numbers."""
        output = self.call(micro_batch, copied=self.changes_batch)
        return self._weighed(micro_batch, output, self.module.parameters())[0] if self.returns_loss else output

    @property
    def changes_batch(self) -> bool:
        """True if the step changes tensors of its mini-batch in place."""
        return False

    def finish(self, micro_batch: MicroBatch, output: Any, sources: Iterable[Tensor]) -> dict[str, Tensor]:
        """Record what the step returned, and computed from `sources`; returns `{LOSS: loss}` in training.

        In training without its graph, which even after its backward holds the inputs of the stage and their gradients.
        A micro-batch that the step skips by returning None adds nothing.
        """
        entry = self._open[micro_batch.lane]
        outputs = entry.outputs
        if not self.returns_loss:
            outputs.append((micro_batch, output))
            return {}
        if output is None and entry.invocation.skips:
            outputs.append((micro_batch, None))
            return {LOSS: scaled(torch.zeros((), device=entry.device), 0, sources)}
        output, loss = self._weighed(micro_batch, output, sources)
        detached = (
            output.detach() if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, output)
        )
        outputs.append((micro_batch, detached))
        return {LOSS: loss}

    def _weighed(self, micro_batch: MicroBatch, output: Any, sources: Iterable[Tensor]) -> tuple[Any, Tensor]:
        """A training step's output with the loss as a mean over samples, and that loss."""
        loss = output if isinstance(output, Tensor) and output.numel() == 1 else loss_of(output)
        invocation, share = self._open[micro_batch.lane].invocation, self.share(micro_batch)
        factor = invocation.factor(micro_batch.num_samples, share)
        loss = loss if factor == 1 else scaled(loss, factor, sources)
        return ({**output, "loss": loss} if isinstance(output, Mapping) else loss), loss

    def call(self, micro_batch: MicroBatch, *, copied: bool = False) -> Any:
        """Run the step, on copies of the samples if it may not change them, with random streams of its own.

        They are the same in the source and in the step.
        """
        if micro_batch.lane not in self._open:
            raise CaptureError("The user's step was asked to run without a batch; call begin() first.")
        entry = self._open[micro_batch.lane]
        seed_streams((entry.seed * 1_000_003 + micro_batch.index) % (1 << 63))
        samples, lists = entry.samples.part(micro_batch.start, micro_batch.stop)
        self._lists = {id(items): items for items in lists if are_plain(items)}
        if copied:
            samples = pytree.tree_map_only(Tensor, _copy, samples)
        return entry.invocation(samples, micro_batch.num_samples, self.share(micro_batch))

    def _is_list(self, value: Any) -> bool:
        return id(value) in self._lists


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


Answer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _Call:
    """The call of a module that is answered. Copies and pickles of the module have none, so they call themselves."""

    answer: Answer

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.module, args, kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()


class Answers:
    """Answers calls of modules, wherever they are called from."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._calls = [_Call(module) for module in modules]
        self._own: list[Any] | None = None

    @contextmanager
    def given(self, answer: Answer) -> Iterator[None]:
        """Inside, a call returns `answer(module, args, kwargs)`."""
        for call in self._calls:
            call.answer = answer
        self._attach()
        try:
            yield
        finally:
            self._detach()
            for call in self._calls:
                del call.answer

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside `given`, modules are called as usual for a while; elsewhere, nothing changes."""
        active = self._own is not None
        self._detach()
        try:
            yield
        finally:
            if active:
                self._attach()

    def _attach(self) -> None:
        self._own = [vars(call.module).get(COMPILED_IN_PLACE) for call in self._calls]
        for call in self._calls:
            vars(call.module)[COMPILED_IN_PLACE] = call

    def _detach(self) -> None:
        for call, own in zip(self._calls, self._own or (), strict=self._own is not None):
            del vars(call.module)[COMPILED_IN_PLACE]
            vars(call.module).update({} if own is None else {COMPILED_IN_PLACE: own})
        self._own = None


@dataclass(slots=True)
class CapturedStage:
    """Runs the source of a stage, followed by the user's step if the stage has it."""

    code: FunctionType
    source: str
    uses_random: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    parts: tuple[nn.Module, ...]
    step: StepRunner | None
    frozen: Mapping[Attribute, Any]

    @property
    def states(self) -> tuple[str, ...]:
        """The parameters and buffers that the stage uses."""
        return (*self.parameters, *self.buffers)

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        return self.with_step(micro_batch, values, self.compute(values, micro_batch.num_samples))

    def compute(self, values: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """The results of the stage's modules."""
        results: dict[str, Tensor] = self.code(dict(values), num_samples)
        return results

    def with_step(
        self, micro_batch: MicroBatch, values: Mapping[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """These results, and those of the user's step on the stage that has it."""
        if self.step is None:
            return results
        return {**results, **self.step.run(micro_batch, {**values, **results})}


@dataclass(slots=True, eq=False)
class InContext(StageWrapper):
    """A stage that computes inside a context, for example autocast; its backward runs outside, as torch recommends."""

    context: Callable[[], AbstractContextManager[Any]]

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The wrapped stage's results, computed inside the context."""
        with self.context():
            return self.stage.forward(values, micro_batch)


@dataclass(slots=True, eq=False)
class RecordableInContext(InContext):
    """A recordable stage that computes inside a context."""

    stage: Recordable

    def compute(self, values: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """The results of the wrapped stage's modules, computed inside the context."""
        with self.context():
            return self.stage.compute(values, num_samples)

    def with_step(
        self, micro_batch: MicroBatch, values: Mapping[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The wrapped stage's results with the user's step, which runs inside the context."""
        with self.context():
            return self.stage.with_step(micro_batch, values, results)


def in_context(stage: StageModule, context: Callable[[], AbstractContextManager[Any]]) -> InContext:
    """A stage that computes inside a context, recordable if it is."""
    return RecordableInContext(stage, context) if isinstance(stage, Recordable) else InContext(stage, context)


@dataclass(slots=True)
class StepAlone:
    """Runs the user's step with its modules."""

    step: StepRunner
    parts: tuple[nn.Module, ...]
    uses_random: bool = True

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The loss of a mini-batch, in training."""
        return self.step.run(micro_batch, values)
