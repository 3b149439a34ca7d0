"""The comparison of the self-check, repeated on some mini-batches while training goes on.

The first samples of a run may not show that a loss is no mean over samples: padding and rare classes come later, and
so do terms of the loss that begin in a later epoch. So the step runs again, with results of the network that it got
before: on some samples of one micro-batch, on some of the next, and on both together. The network does not run again,
and no other rank takes part.

    micro-batches    |  a a      |      b b  |           |
    losses              f(a)         f(b)                    compared with f(a, b)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp.capture.batch import BatchDims, map_samples
from lightning_gpp.graph import TensorSpec
from lightning_gpp.runtime.draws import Draws, NoShare
from lightning_gpp.runtime.random import python_streams
from lightning_gpp.runtime.stage import LOSS, MicroBatch
from lightning_gpp.stages.code import variable
from lightning_gpp.stages.step import Invocation, UserStep
from lightning_gpp.training.host import Job
from lightning_gpp.training.logged_reductions import LoggedReductions, unlike_means
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.training.remedies import (
    DEPENDENT,
    OFF,
    UNLIKE_ONE_DEVICE,
    logged_otherwise,
    other_reduction,
    untried,
)
from lightning_gpp.training.session import Session
from lightning_gpp.training.tolerances import TOLERANCES, least_precise
from lightning_gpp.training.unnoticed import NO_MINI_BATCH, copy_for, unnoticed

log = logging.getLogger(__name__)

MOST_SAMPLES: Final = 16
"""Samples of each part, at most."""
FEW_BYTES: Final = 1 << 23
"""Bytes of results that are kept while they have more than one sample of each part."""
MOST_BYTES: Final = 1 << 27
"""Bytes of results that are kept at all."""

TwoParts = tuple[range, range]
"""Samples of two micro-batches, counted in the mini-batch."""


class RepeatedComparison:
    """Compares a loss with itself in micro-batches, on the first rank that runs the step.

    Args:
        job: the job of the run.
        combined: the names of logged values that are not combined by their mean.

    Attributes:
        ended: whether it has warned, so that there is nothing more to say.
    """

    def __init__(self, job: Job, combined: Container[str] = ()) -> None:
        self._job, self._combined, self._turn, self.ended = job, combined, 0, False
        self._told_of_logs = False

    def during(
        self, session: Session, batch: Any, rest: Sequence[Any], batch_size: int, number: int, run: Callable[[], Any]
    ) -> Any:
        """The result of `run()`, which trains mini-batch `number`; its step is compared afterwards."""
        step = session.pipeline.step
        parts = chosen_parts(session, batch_size, self._turn) if isinstance(step, UserStep) else None
        self._turn += 1
        if parts is None or not isinstance(step, UserStep):
            return run()
        step.watcher = kept = KeptResults(read_by(step), parts)
        try:
            result = run()
        finally:
            step.watcher = None
        if text := self._difference(session, step, kept, batch, rest, batch_size, number):
            self.ended = True
            self._job.control.warn(untried(text))
        return result

    def _difference(
        self,
        session: Session,
        step: UserStep,
        kept: KeptResults,
        batch: Any,
        rest: Sequence[Any],
        batch_size: int,
        number: int,
    ) -> str:
        """The warning; empty if there is none, or the step cannot run on these samples alone."""
        job, capture = self._job, session.capture
        if kept.constants_differ:
            log.info("The step was not compared with itself in mini-batch %d: %s", number, _OF_ALL_SAMPLES)
            return ""
        again = StepAgain(job, step, kept, batch, rest, batch_size)
        try:
            losses = again.losses()
        except Exception as error:  # user code on fewer samples than it is written for, or draws that mix samples
            log.info("The step was not compared with itself in mini-batch %d: %s", number, error)
            return ""
        tolerance = TOLERANCES[least_precise(job, capture, losses.dtype)]
        text = losses.warning(number, tolerance, job.options.loss_reduction == "sum")
        names = [] if text or self._told_of_logs else again.unlike_means(tolerance)
        if names := [name for name in names if name not in self._combined]:
            self._told_of_logs = True
            job.control.warn(untried(logged_otherwise(names)))
        return text


_OF_ALL_SAMPLES: Final = "it reads a result of a module that depends on all samples, and that has no samples"


def chosen_parts(session: Session, batch_size: int, turn: int) -> TwoParts | None:
    """Samples of two neighbouring micro-batches, others in each turn; None if there are none to compare."""
    plan, step = session.plan, session.pipeline.step
    intervals = plan.intervals(plan.step_stage, batch_size)
    assert isinstance(step, UserStep)
    most = _most_samples(read_by(step))
    if len(intervals) < 2 or most == 0:
        return None
    first = turn % (len(intervals) - 1)
    before, after = (_some(range(*interval), most, turn) for interval in intervals[first : first + 2])
    return before, after


def read_by(step: UserStep) -> dict[str, TensorSpec]:
    """The specs of the values from which the step, after the tail of the network, can run again, by name."""
    results, read = ((), ()) if step.tail is None else (step.tail.results, step.tail.read)
    refs = dict.fromkeys([*(ref for ref in step.network.needed if ref not in results), *read])
    return {variable(ref): step.spec_of(ref) for ref in refs}


def _some(samples: range, most: int, turn: int) -> range:
    """At most so many samples in a row, that begin elsewhere in each turn."""
    spare = len(samples) - most
    start = turn * most % (spare + 1) if spare > 0 else 0
    return samples[start : start + most]


def _most_samples(specs: Mapping[str, TensorSpec]) -> int:
    """Samples of a part, so that those of both take little memory; 0 if they cannot be cut out, or take too much."""
    cut = [spec for spec in specs.values() if spec.varies]
    if not cut or any(not spec.sliceable for spec in cut):
        return 0
    sample = 2 * sum(spec.bytes(1) for spec in cut)
    return 0 if sample > MOST_BYTES else max(1, min(MOST_SAMPLES, FEW_BYTES // max(sample, 1)))


class KeptResults:
    """The results of network calls on the samples of two parts. Results without samples are those of the first one.

    Args:
        specs: the specs of the results, by name.
        parts: the samples.

    Attributes:
        with_constants: whether results without samples depend on those of the micro-batch.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], parts: TwoParts) -> None:
        self.parts, self._specs = parts, specs
        self.with_constants = any(spec.mixes_samples for spec in specs.values())
        self._values: dict[range, dict[str, Tensor]] = {}

    def __call__(self, micro_batch: MicroBatch, values: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            if micro_batch.start <= part.start and part.stop <= micro_batch.stop:
                start = part.start - micro_batch.start
                known = [name for name in self._specs if name in values]
                self._values[part] = {name: self._cut(name, values[name], start, len(part)) for name in known}

    def _cut(self, name: str, value: Tensor, start: int, length: int) -> Tensor:
        dim = self._specs[name].batch_dim
        value = value.detach()
        return value.clone() if dim is None else value.narrow(dim, start, length).clone()

    @property
    def constants_differ(self) -> bool:
        """True if a result without samples is another one for each part, so that none is known for both together."""
        names = [name for name, spec in self._specs.items() if spec.mixes_samples and spec.batch_dim is None]
        first, *others = (self._values.get(part, {}) for part in self.parts)
        known = [name for name in names if name in first]
        return any(not torch.equal(first[name], other[name]) for name in known for other in others if name in other)

    def of(self, parts: Sequence[range]) -> dict[str, Tensor]:
        """The results for these parts together, in tensors that no other run of the step has."""
        first = self._values[parts[0]]
        return {name: self._joined(name, [self._values[part][name] for part in parts]) for name in first}

    def _joined(self, name: str, values: Sequence[Tensor]) -> Tensor:
        dim = self._specs[name].batch_dim
        return values[0].clone() if dim is None else torch.cat(list(values), dim)


def samples_of_parts(batch: Any, batch_size: int, parts: Sequence[range], dims: BatchDims) -> Any:
    """The samples of several parts of a mini-batch, in tensors and lists of their own."""

    def joined(tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor.narrow(dim, part.start, len(part)) for part in parts], dim)

    def listed(items: Any) -> Any:
        return type(items)(items[place] for part in parts for place in part)

    return map_samples(batch, batch_size, joined, listed, dims)


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of two parts together, and of each.

    `sizes`: samples of each part. `dtype`: the type of the losses. `with_constants`: whether results that depend on all
    samples of a micro-batch (perhaps their number) were the same in all runs.
    """

    whole: float
    parts: tuple[float, float]
    sizes: tuple[int, int]
    dtype: torch.dtype
    with_constants: bool = False

    def warning(self, number: int, tolerance: float, sums: bool) -> str:
        """A warning that names mini-batch `number`; empty if the parts' mean, or sum (`sums`), is the whole."""
        expected = self._combined(sums)
        if not math.isfinite(self.whole) or self._near(expected, tolerance):
            return ""
        other = self._near(self._combined(not sums), tolerance)
        if other and self.with_constants:
            return ""
        return (
            f"In mini-batch {number}, the loss of {sum(self.sizes)} samples is {self.whole:.6g} undivided, and "
            f"{expected:.6g} as the {'sum' if sums else 'mean'} over micro-batches of "
            f"{' and '.join(str(size) for size in dict.fromkeys(self.sizes))}. {UNLIKE_ONE_DEVICE} "
            f"{other_reduction(sums) if other else DEPENDENT} {OFF}"
        )

    def _combined(self, sums: bool) -> float:
        if sums:
            return sum(self.parts)
        return sum(loss * size for loss, size in zip(self.parts, self.sizes, strict=True)) / sum(self.sizes)

    def _near(self, combined: float, tolerance: float) -> bool:
        """True if rounding explains the difference, which grows with each of the losses, also if they cancel out."""
        return abs(combined - self.whole) <= tolerance * max(map(abs, (self.whole, *self.parts)))


@dataclass(slots=True)
class StepAgain:
    """Runs the user's step again, without traces: on copies of the module, with results of network calls."""

    job: Job
    step: UserStep
    kept: KeptResults
    batch: Any
    rest: Sequence[Any]
    batch_size: int
    _draws: list[tuple[object, ...]] = field(default_factory=list)
    _whole: LoggedReductions = field(default_factory=LoggedReductions)
    _parts: LoggedReductions = field(default_factory=LoggedReductions)

    def losses(self) -> Losses:
        """The losses of both parts together, and of each.

        Raises:
            NoShare: the step draws numbers of which parts have no share.
            Exception: whatever the step raises.
        """
        first, second = self.kept.parts
        draws = Draws(len(first) + len(second))
        with unnoticed(self.job), draws:
            whole = self._loss([first, second], self._whole)
            with draws.share(0, len(first)):
                before = self._loss([first], self._parts)
            with draws.share(len(first), len(first) + len(second)):
                after = self._loss([second], self._parts)
        if any(drawn != self._draws[0] for drawn in self._draws):
            raise NoShare("the step draws other numbers for other samples")
        losses = whole.item(), (before.item(), after.item())
        sizes = len(first), len(second)
        return Losses(*losses, sizes, whole.dtype, self.kept.with_constants)

    def unlike_means(self, tolerance: float) -> list[str]:
        """The names of logged values that are no means over samples; those that differ anyway (times) do not count."""
        again, parts = LoggedReductions(), self.kept.parts

        def near(actual: float, expected: float) -> bool:
            return abs(actual - expected) <= tolerance * max(abs(actual), abs(expected))

        names = unlike_means(self._whole, self._parts, [*map(len, parts)], near)
        if names:
            with unnoticed(self.job), Draws(sum(map(len, parts))):
                self._loss(parts, again)
        return [name for name in names if near(again.means[name][0], self._whole.means[name][0])]

    def _loss(self, parts: Sequence[range], logged: LoggedReductions) -> Tensor:
        total, copied = sum(map(len, parts)), copy_for(self.job, self.step)
        again = self.step.with_module(copied)
        samples = samples_of_parts(self.batch, self.batch_size, parts, self.step.dims)
        around = self.job.host.around(TRAINING, NO_MINI_BATCH)
        invocation = Invocation(function=getattr(copied, TRAINING), rest=self.rest, around=around)
        again.begin(samples, invocation, 0, total)
        try:
            with logged.recorded(copied):
                loss = again.run(MicroBatch(0, 0, total, total), self._values(copied, parts, total))[LOSS]
            self._draws.append(python_streams())
        finally:
            again.end()
            self.job.host.forget(range(NO_MINI_BATCH, NO_MINI_BATCH + 1))
        return loss

    def _values(self, copied: nn.Module, parts: Sequence[range], total: int) -> dict[str, Tensor]:
        """The results of the network, those of its tail computed again."""
        values, tail = self.kept.of(parts), self.step.tail
        if tail is None:
            return values
        with self.job.host.context(TRAINING)():
            return {**values, **tail.compile(copied)(dict(values), total)}
