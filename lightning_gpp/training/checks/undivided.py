"""Compares the loss of undivided samples with that of the same samples in micro-batches, on one device.

A pipeline averages (or sums) the losses of micro-batches. That is the loss of the mini-batch only if no sample depends
on another and all count the same. It is not for contrastive losses, means over unmasked tokens, BatchNorm, batches that
are cut along another dimension, ...
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import BatchNorm
from lightning_gpp.capture.batch import GUESSED, UNCOUNTED, BatchDims, samples_in, slice_batch
from lightning_gpp.capture.captured import loss_of
from lightning_gpp.plan import Plan
from lightning_gpp.plan_parts import even_parts
from lightning_gpp.runtime.random import Draws, NoShare, python_streams
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages.counts import Counted, candidates, shares_of
from lightning_gpp.stages.division import Division
from lightning_gpp.stages.step import Invocation, StepRunner
from lightning_gpp.training.checks.results import (
    Logged,
    differing,
    distance,
    norms,
    other_reductions,
    projections,
    unlike_means,
)
from lightning_gpp.wording import some

log = logging.getLogger(__name__)

SAMPLES: Final = 2
"""Samples of each of the two micro-batches, at most."""

_ROUNDINGS: Final = 100.0
"""Machine epsilons by which rounding changes a gradient, relative to the largest, as other sums have other orders."""
_ABSURD: Final = 10.0
"""A relative difference above which the gradient is near zero."""


WHOLE: Final = "strategy.step=whole"
UNCUT: Final = "strategy.num_micro_batches=1"
"""Options that give the step, or also its network calls, undivided mini-batches."""
OFF: Final = "strategy.self_check=false ends this comparison."
_DEPENDENT: Final = (
    "Samples depend on each other or do not count the same (a contrastive loss, a mean over unmasked tokens), the "
    "step or a module keeps state between its calls, or the batch is cut along a dimension that does not count "
    f"samples (say which by strategy.batch_dims). Give the step the undivided mini-batch by {WHOLE}."
)
_NORMALISES: Final = (
    "BatchNorm normalises each micro-batch by itself, whatever sync_batchnorm says: use larger micro-batches "
    "(strategy.micro_batch_size), or a norm within samples. This compares the module before hooks of training run: "
    "what one of them puts into eval() will not differ, nor what setup() puts into it."
)
MIXED_DRAWS: Final = (
    "The training step draws random numbers that mix its samples (a permutation, as for mixup), so its loss in "
    "micro-batches was not compared with that of the same samples undivided (strategy.self_check). It draws anew for "
    f"each micro-batch, from the samples of that one; {WHOLE} gives it the undivided mini-batch."
)


@dataclass(frozen=True, slots=True)
class Result:
    """The losses of micro-batches, the sizes of these and what they count for, the projections and norms of the
    gradients of their loss, and the values that were logged with another reduction than the mean. `drawn`: the states
    of Python's and NumPy's random streams after the runs, which began alike.
    """

    losses: list[float]
    sizes: list[int]
    shares: list[float]
    gradients: Tensor
    norms: list[float]
    logged: Logged
    drawn: set[tuple[object, ...]]

    @property
    def sum(self) -> float:
        return sum(self.losses)

    @property
    def mean(self) -> float:
        return sum(loss * size for loss, size in zip(self.losses, self.sizes, strict=True)) / sum(self.sizes)

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.norms)


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples `[start, stop)` of a batch of `total` samples, of which all together are compared. `offset`: the number
    of its first sample among these.
    """

    batch: Any
    start: int
    stop: int
    total: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CutComparison:
    """A few samples, undivided and in micro-batches.

    Args:
        module: a copy of the module, with its parameters.
        step: the unsplit step of the module.
        invocation: the call of the user's step.
        undivided: the samples.
        parts: the same in micro-batches.
        sums: whether losses of micro-batches are added instead of averaged.
        tolerance: relative difference of the losses that rounding explains.
        epsilon: machine epsilon of the least precise type that gradients pass through.
        of_calls: whether the step is the network calls of one that runs as a whole.

    Attributes:
        combined: how logged values follow from those of micro-batches, if not as those of batches do (found by
            `warning`).
    """

    module: nn.Module
    step: StepRunner
    invocation: Invocation
    undivided: Piece
    parts: Sequence[Piece]
    sums: bool
    tolerance: float
    epsilon: float
    of_calls: bool = False
    combined: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Samples that are compared."""
        return sum(part.size for part in self.parts)

    @property
    def size(self) -> int:
        """Samples of the largest micro-batch."""
        return max(part.size for part in self.parts)

    def warning(self) -> str:
        """A warning with the difference and the remedy; empty if there is none."""
        whole, parts = self._both()
        self.combined.update(other_reductions(whole.logged, parts.logged, self._near))
        if not math.isfinite(whole.sum):
            return (
                f"The loss of the first {self.total} samples is {whole.sum:g}, undivided, too. Look for a division by "
                "zero, a logarithm or a mean over nothing in the step, and for such values in the data."
            )
        if self._same(whole, parts):
            return self._logged_otherwise(whole, parts)
        if self.of_calls:
            return _calls_differ(self.total, self.size, normalises(self.module))
        rate = distance(parts.gradients, whole.gradients) / max(whole.norm, 1e-30)
        return (
            f"The loss of the first {self.total} samples is {whole.sum:.6g} undivided, and {self._loss(parts):.6g} as "
            f"the {'sum' if self.sums else 'mean'} over micro-batches of {self.size}; their gradients differ{_by(rate)}"
            f". So training in micro-batches is not training on one device. {self._cause(whole, parts)} {OFF}"
        )

    def _logged_otherwise(self, whole: Result, parts: Result) -> str:
        """A warning of logged values that are no means over samples; those that differ anyway (times) do not count."""
        unlike = unlike_means(whole.logged, parts.logged, parts.shares, self._near)
        names = [name for name in unlike if name not in self.combined]
        again = self._again().logged if names else whole.logged
        steady = [name for name in names if self._near(again.values[name][0], whole.logged.values[name][0])]
        return _no_means(steady) if steady else ""

    def _loss(self, parts: Result) -> float:
        return parts.sum if self.sums else parts.mean

    def _same(self, whole: Result, parts: Result) -> bool:
        """True if loss and gradients are equal, also those of each parameter: a small term of the loss may differ."""
        near = self._near(self._loss(parts), whole.sum)
        as_a_whole = distance(parts.gradients, whole.gradients) <= 5 * self.tolerance * max(whole.norm, 1e-12)
        noise = _ROUNDINGS * self.epsilon
        each = differing(parts.gradients, whole.gradients, whole.norms, self.tolerance, noise)
        return near and as_a_whole and not each

    def _near(self, actual: float, expected: float) -> bool:
        return abs(actual - expected) <= self.tolerance * max(abs(actual), abs(expected))

    def _cause(self, whole: Result, parts: Result) -> str:
        if self._near(parts.mean if self.sums else parts.sum, whole.sum):
            kind = "mean" if self.sums else "sum"
            return f"This loss is a {kind} over samples: set strategy.loss_reduction={kind}."
        if found := [str(by) for by in self._counting()]:
            return _is_mean_over(found)
        if not normalises(self.module):
            return _DEPENDENT
        for part in self.module.modules():
            if isinstance(part, BatchNorm):
                part.eval()
        others = self._both()  # differ by something else than BatchNorm, if they do
        return _NORMALISES if self._same(*others) else f"{_NORMALISES} {self._cause(*others)}"

    def _counting(self) -> list[Counted]:
        """The entries over which the loss may be a mean: with them micro-batches have the gradient of all samples."""
        dims = GUESSED if self.step.dims == UNCOUNTED else self.step.dims
        kinds = candidates(self.undivided.batch, self.undivided.total, dims)
        return next(filter(None, ([by for by in kind if self._is_right(by)] for kind in kinds)), [])

    def _is_right(self, by: Counted) -> bool:
        other = replace(self, invocation=replace(self.invocation, counted=by), sums=False)
        return other._same(*other._both())

    def _both(self) -> tuple[Result, Result]:
        draws = Draws(self.total)
        with draws:
            whole, parts = self._run(draws, [self.undivided]), self._run(draws, self.parts)
        if len(whole.drawn | parts.drawn) > 1:
            raise NoShare("the number of draws from Python's or NumPy's stream depends on the samples")
        return whole, parts

    def _again(self) -> Result:
        """The undivided samples, with the state that the runs before have left in the module."""
        draws = Draws(self.total)
        with draws:
            return self._run(draws, [self.undivided])

    def _run(self, draws: Draws, parts: Sequence[Piece]) -> Result:
        self.module.zero_grad()
        losses, logged, drawn = list[float](), Logged(), set[tuple[object, ...]]()
        sizes = [part.size for part in parts]
        shares = self._shares(parts, sizes)
        for part, share in zip(parts, shares, strict=True):
            with ExitStack() as stack, torch.enable_grad(), logged.recorded(self.module):
                if len(parts) > 1:
                    stack.enter_context(draws.share(part.offset, part.offset + part.size))
                loss, streams = self._loss_of(part, share)
                (loss * (1.0 if self.sums else part.size / sum(sizes))).backward()
                losses.append(loss.item())
                drawn.add(streams)
        return Result(losses, sizes, shares, projections(self.module), norms(self.module), logged, drawn)

    def _shares(self, parts: Sequence[Piece], sizes: Sequence[int]) -> list[float]:
        """The samples that these count for."""
        dims = self.step.dims
        batches = [slice_batch(part.batch, part.start, part.stop, part.total, dims) for part in parts]
        return shares_of(batches, sizes, self.invocation.counted, dims) or list(map(float, sizes))

    def _loss_of(self, part: Piece, share: float) -> tuple[Tensor, tuple[object, ...]]:
        """The loss of some samples, and the states of random streams after it."""
        self.step.begin(part.batch, self.invocation, seed=0, total=part.total, share=share)
        loss = loss_of(self.step.whole(MicroBatch(0, part.start, part.stop, part.total)))
        streams = python_streams()
        self.step.end()
        return loss, streams


def few_samples(plan: Plan, batch: Any, batch_size: int, dims: BatchDims = GUESSED) -> tuple[Piece, list[Piece]]:
    """The samples to compare, and these in micro-batches; in one if the step's stage does not cut any."""
    size = min(SAMPLES, plan.stages[plan.step_stage].micro_batch_size)
    total = min(2 * size, batch_size) if plan.stages[plan.step_stage].micro_batch_size < batch_size else size
    few = slice_batch(batch, 0, total, batch_size, dims)
    return Piece(few, 0, total, total, 0), [Piece(few, *part, total, part[0]) for part in even_parts(total, size)]


def divided_samples(division: Division, batch: Any) -> tuple[Piece, list[Piece]]:
    """The same for micro-batches with sizes of their own."""
    few = division.few(batch, 2 * SAMPLES)
    parts = division.parts(few, 2)
    sizes = [samples_in(part, division.dims) for part in parts]
    offsets = [0, *accumulate(sizes)]
    total = samples_in(few, division.dims)
    pieces = [Piece(part, 0, size, size, at) for part, size, at in zip(parts, sizes, offsets, strict=False)]
    return Piece(few, 0, total, total, 0), pieces


def tried(message: str, works: Callable[[], bool]) -> str:
    """The message, which names a step as a whole only if that `works` on this model, otherwise a single micro-batch."""
    return message if WHOLE not in message or works() else message.replace(WHOLE, UNCUT)


def difference(comparison: CutComparison, inform: Callable[[str], None] = log.info) -> str:
    """The warning of a comparison; empty if there is nothing to compare, or the step fails on few samples.

    `inform`: told of steps that cannot be compared because of what they draw.
    """
    if len(comparison.parts) < 2:
        return ""
    try:
        return comparison.warning()
    except NoShare:
        inform(MIXED_DRAWS)
    except Exception as error:  # user code on fewer samples than it is written for
        log.info("The step was not compared with itself in micro-batches: %s: %s", type(error).__name__, error)
    return ""


def _by(rate: float) -> str:
    """A relative difference in words; one of a gradient near zero says nothing as a number."""
    return f" by {100 * rate:.3g} %" if rate < _ABSURD else f" by more than {100 * _ABSURD:.0f} % (it is near zero)"


def _is_mean_over(found: Sequence[str]) -> str:
    """The remedy for a loss that is a mean over some entries of the mini-batch."""
    first, *others = found
    if not others:
        return f"This loss is a mean over the entries of {first}: set strategy.loss_reduction={first}."
    return (
        f"This loss is a mean over the entries of {first} or {' or '.join(others)}, which these samples do not tell "
        "apart: set strategy.loss_reduction to the one that it averages (shifted: without the first entry of each "
        "sample, as in language models that shift labels themselves)."
    )


def _calls_differ(samples: int, size: int, normalised: bool) -> str:
    """The warning of network calls whose results depend on the micro-batches in which they are computed."""
    text = (
        f"The network calls of the step, which runs as a whole, have other results for {samples} samples at once than "
        f"for micro-batches of {size}: "
    )
    if normalised:
        return f"{text}BatchNorm normalises each by itself. {UNCUT} leaves network calls undivided. {OFF}"
    return (
        f"{text}an argument has another number of rows than samples (several images per sample in one tensor), or a "
        "module combines samples. So they get undivided mini-batches, and devices wait for each other. strategy."
        "self_check=false cuts them."
    )


def normalises(module: nn.Module) -> bool:
    """True if a layer of the module computes statistics of the samples that it gets."""
    return any(isinstance(part, BatchNorm) and part.training for part in module.modules())


def _no_means(names: Sequence[str]) -> str:
    """The warning of logged values that are no means over samples."""
    many = len(names) > 1
    return (
        f"{some(names, most=5)}, which the training step logs, {'are' if many else 'is'} no mean over samples. It runs "
        "once for each micro-batch, so the mean over micro-batches is logged, and not what one device logs. Training "
        "itself is that of one device. Log a metric object (self.log(name, self.metric)), whose state is that of all "
        "samples. {OFF}"
    )
