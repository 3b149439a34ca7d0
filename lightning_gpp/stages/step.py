"""The user's step at run time, on micro-batches of open mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import UNCOUNTED, BatchDims, Samples, device_of, samples_in
from lightning_gpp.capture.captured import loss_of
from lightning_gpp.capture.items import are_plain
from lightning_gpp.errors import CaptureError
from lightning_gpp.runtime.random import seed_streams, undisturbed
from lightning_gpp.runtime.stage import LOSS, MicroBatch
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
    """

    function: Callable[..., Any]
    rest: Sequence[Any] = ()
    around: Callable[[int, float], AbstractContextManager[Any]] = lambda *_: nullcontext()
    sums: bool = False
    counted: Counted | None = None

    def __call__(self, samples: Any, num_samples: int, share: float) -> Any:
        with self.around(num_samples, share):
            return self.function(samples, *self.rest)

    def weighed(self, output: Any, num_samples: int, share: float) -> Any:
        """A training step's output with the loss as a mean over samples."""
        factor = 1 / num_samples if self.sums else share / num_samples
        return output if factor == 1 else _scaled(output, factor)


def _scaled(output: Any, factor: float) -> Any:
    """A step's output with another loss."""
    if isinstance(output, torch.Tensor):
        return scaled(output, factor)
    return {**output, "loss": scaled(output["loss"], factor)} if isinstance(output, Mapping) else output


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

    def inputs(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Run the step up to its network calls, and return their tensors by slot name."""
        raise TypeError(f"{type(self).__name__} does not compute the inputs of the network.")

    def whole(self, micro_batch: MicroBatch) -> Any:
        """Run the unsplit step with its modules and return its result. Draws the same random numbers."""
        self.start_streams(micro_batch)
        return self.call(micro_batch, copied=self.changes_batch)

    @property
    def changes_batch(self) -> bool:
        """True if the step changes tensors of its mini-batch in place."""
        return False

    def finish(self, micro_batch: MicroBatch, output: Any) -> dict[str, torch.Tensor]:
        """Record what the step returned; returns `{LOSS: loss}` in training.

        In training without its graph, which even after its backward holds the inputs of the stage and their gradients.
        """
        outputs = self._open[micro_batch.lane].outputs
        if not self.returns_loss:
            outputs.append((micro_batch, output))
            return {}
        kept = dict(output) if isinstance(output, Mapping) else output
        outputs.append((micro_batch, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, kept)))
        return {LOSS: loss_of(output)}

    def call(self, micro_batch: MicroBatch, *, copied: bool = False) -> Any:
        """Run the step, on copies of the samples if it may not change them."""
        if micro_batch.lane not in self._open:
            raise CaptureError("The user's step was asked to run without a batch; call begin() first.")
        entry = self._open[micro_batch.lane]
        samples, lists = entry.samples.part(micro_batch.start, micro_batch.stop)
        self._lists = {id(items): items for items in lists if are_plain(items)}
        if copied:
            samples = pytree.tree_map_only(torch.Tensor, _copy, samples)
        number, counting = micro_batch.num_samples, self.share(micro_batch)
        output = entry.invocation(samples, number, counting)
        return entry.invocation.weighed(output, number, counting) if self.returns_loss else output

    def _is_list(self, value: Any) -> bool:
        return id(value) in self._lists

    def start_streams(self, micro_batch: MicroBatch) -> None:
        """Start the step's own random streams, the same for the source and the step."""
        seed_streams((self._open[micro_batch.lane].seed * 1_000_003 + micro_batch.index) % (1 << 63))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
