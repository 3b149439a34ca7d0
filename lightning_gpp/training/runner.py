"""Runs mini-batches through the pipeline, which flushes after each or goes on with the next.

The results of the user's step on micro-batches are combined into that on the mini-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.errors import CaptureError, ConfigError, GPPError
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages.counts import counted
from lightning_gpp.stages.division import Division
from lightning_gpp.stages.step import Invocation
from lightning_gpp.training.asynchronous import Asynchronous
from lightning_gpp.training.data.batches import SessionCache, later
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.session import Part, Session
from lightning_gpp.training.sessions import Sessions
from lightning_gpp.training.tensors.foreign import alone
from lightning_gpp.training.updates.entries import EntriesOfStep

Outputs = Sequence[tuple[MicroBatch, Any]]
"""The results of the user's step for each micro-batch, in order."""


Ways = tuple[tuple[int, int, bool], ...]


class Runner:
    """Runs the user's steps on announced mini-batches. All ranks call its methods together.

    Args:
        sessions: makes the sessions, which run the user's steps.
        optimizers: the optimizers, in the user's order.

    Attributes:
        current: the session of the last mini-batch.
        sums: whether the loss of the training step is a sum over samples.
        counted: the entries by which micro-batches count, and the mini-batches of an optimizer step; None for samples.
        entries: what these mini-batches count for.
        skips: whether the training step may return None for micro-batches.
    """

    def __init__(self, sessions: Sessions, optimizers: Callable[[], list[Optimizer]]) -> None:
        self._new, self._optimizers, self._asynchronous = sessions.new, optimizers, sessions.site.asynchronous
        self._job, self._incoming, self._division = sessions.job, sessions.incoming, sessions.job.division
        self.sums = self._job.options.loss_reduction == "sum"
        self.counted = counted(self._job.options.loss_reduction)
        self.entries = EntriesOfStep(self._job.module, self._job.control)
        self.current: Session | None = None
        self.skips = False
        self._sessions = SessionCache[Session](self._job.control.warn)
        self._trained: Session | None = None
        self._leading: dict[tuple[bytes, Ways], Session] = {}
        """The sessions with the programs of divided mini-batches, by the trained parameters and the ways of tensors."""
        self._running: dict[str, tuple[Session, int]] = {}

    def session(self, step: str, arguments: Sequence[Any]) -> Session:
        """The session for a mini-batch, which becomes the current one."""
        incoming, frozen = self._incoming, self._incoming.frozen
        if step == TRAINING:  # evaluation has no gradients
            incoming.follow_hooks()
        values = incoming.frozen_values, frozen.since(alone=self._job.control.sole) if frozen else 0
        key = (step, incoming.form), values
        make = partial(self._new, step, arguments[0], values)
        self.current = session = self._sessions.get(key) or self._sessions.make(key, make, frozen.names)
        return session

    def lead(self, step: str) -> int:
        """Mini-batches of an evaluation step that have to be known before their turn; 0 before the first."""
        return max((session.ahead for session in self._sessions.values() if session.capture.step == step), default=0)

    def train(self, arguments: Sequence[Any], weight: float, accumulated: int, number: int) -> Outputs:
        """Run forwards and backwards of the announced mini-batch. Returns the results of the step where it ran.

        Args:
            arguments: arguments of the user's step, the mini-batch first.
            weight: factor of the gradients.
            accumulated: mini-batches per optimizer step.
            number: number of mini-batches that were trained before.
        """
        if self._asynchronous is not None:
            return self._train_ahead(self._asynchronous, arguments, weight, accumulated, number)
        if self._division is not None:
            return self._train_parts(self._division, arguments, weight, accumulated, number)
        session, (batch, *_) = self.session(TRAINING, arguments), arguments
        weight *= self._emphasis(session, [(batch, self._incoming.batch_size)], accumulated)
        return self.flushed(session, arguments, weight, number)

    def _emphasis(self, session: Session, parts: Iterable[tuple[Any, int]], accumulated: int) -> float:
        """The weight of a mini-batch, of such parts and their samples, beside the others of its optimizer step."""
        number, counted = accumulated * self._job.control.num_pipelines, self.counted
        if counted is None or number == 1:
            return 1.0
        dims, here = session.pipeline.step.dims, parts if self._job.control.runs_step else ()
        return number * self.entries.add(sum(counted.in_part(part, size, dims) for part, size in here))

    def _train_parts(
        self, division: Division, arguments: Sequence[Any], weight: float, accumulated: int, number: int
    ) -> Outputs:
        """Run a mini-batch whose micro-batches have sizes of their own, in one program that all such ones share."""
        incoming, (batch, *rest) = self._incoming, arguments
        incoming.follow_hooks()
        facts, batches = incoming.divided(batch, division)
        parts = []
        for place, of_part in enumerate(facts):
            part = batches[place] if batches else None
            with incoming.taken_for(of_part):
                parts.append(Part(self.session(TRAINING, [part, *rest]), part, of_part[0]))
        if not self.sums:
            weight *= incoming.batch_size / sum(part.num_samples for part in parts)
        ways = _ways(parts)
        leading = self.current = self._leading.setdefault((incoming.trained(), ways), parts[0].session)
        weight *= self._emphasis(leading, [(part.batch, part.num_samples) for part in parts], accumulated)
        invocation = self._invocation(leading, rest, number)
        with on_one_rank():
            return leading.run_parts(parts, invocation, loss_weight=weight, step=number)

    def flushed(self, session: Session, arguments: Sequence[Any], weight: float, number: int) -> Outputs:
        """Run a step that ends with an empty pipeline. Returns its results where it ran."""
        batch, *rest = arguments
        invocation = self._invocation(session, rest, number)
        with on_one_rank():
            return session.run(batch, invocation, self._incoming.batch_size, loss_weight=weight, step=number)

    def ahead(self, session: Session, arguments: Sequence[Any], weight: float, number: int, segment: range) -> Outputs:
        """Run a period of a pipeline that does not flush. Returns the results of the step where it ran.

        `segment`: the mini-batches between two flushes, by number.
        """
        step = session.capture.step
        running = session, self._incoming.form
        if number != segment.start and running != self._running[step]:
            raise GPPError(self._changed_under_way(self._running[step][1]))
        self._running[step] = running
        batch, *rest = arguments
        incoming, size = self._incoming, self._incoming.batch_size
        batches = [batch, *incoming.feed.upcoming] if self._job.control.runs_step else []

        def invocation(later_by: int) -> Invocation:
            return self._invocation(session, later(rest, later_by), number + later_by)

        with on_one_rank():
            return session.run_ahead(batches, invocation, size, loss_weight=weight, step=number, segment=segment)

    def _changed_under_way(self, form: int) -> str:
        if form != self._incoming.form:
            return (
                "Parameters were frozen or unfrozen while mini-batches are in the pipeline, which does not flush. Let "
                "it flush before (strategy.flush_every), or after each mini-batch (strategy.weights=synchronous)."
            )
        return (
            f"{self._incoming.frozen.names()} changed while mini-batches are in the pipeline, which does not flush, "
            "and what is cut into stages depends on it. Pass it to modules as a tensor."
        )

    def give_up(self, number: int) -> None:
        """Drop the mini-batches in a pipeline that does not flush; the next one, of this number, fills it again."""
        session, asynchronous = self._trained, self._asynchronous
        if asynchronous is None or session is None or session.latest is None:
            return
        program = session.latest.program
        if batches := asynchronous.on_their_way(number, program.lead):
            session.give_up(program.batch_size, batches)
            self._job.host.forget(batches)
        asynchronous.empty(number)

    def _invocation(self, session: Session, rest: Sequence[Any], number: int) -> Invocation:
        step, trains = session.capture.step, session.training
        host = self._job.host
        around, function = host.around(step, number if trains else None), getattr(self._job.module, step)
        sums, empty = self.sums and trains, trains and self.entries.here == 0
        return Invocation(
            function=function,
            rest=rest,
            around=around,
            sums=sums,
            counted=self.counted,
            empty=empty,
            skips=self.skips,
        )

    def _train_ahead(
        self, asynchronous: Asynchronous, arguments: Sequence[Any], weight: float, accumulated: int, number: int
    ) -> Outputs:
        if self._incoming.anew:
            self.give_up(number)
        if self.counted is not None and accumulated * self._job.control.num_pipelines > 1:
            raise ConfigError(
                f"strategy.loss_reduction={self.counted} weighs the mini-batches of an optimizer step, which needs a "
                "flush: set strategy.weights=synchronous."
            )
        self._trained = session = self.session(TRAINING, arguments)
        size, facts = self._incoming.batch_size, self._incoming.facts
        weights = partial(session.weights_of, size, self._optimizers)
        segment = asynchronous.enter(number, facts, session.lead(size), accumulated, weights)
        return self.ahead(session, arguments, weight, number, segment)


def _ways(parts: Sequence[Part]) -> Ways:
    """The ways of tensors between stages, which all micro-batches of a mini-batch must have in common."""
    first, *others = (tuple((e.src, e.dst, e.differentiable) for e in part.session.plan.edges) for part in parts)
    for number, ways in enumerate(others, 1):
        if ways != first:
            raise CaptureError(
                f"Micro-batch {number} of the mini-batch calls other modules than the first one, so that tensors go "
                "other ways between the stages. Let the step run as a whole: strategy.step=whole."
            )
    return first


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Inside, user code runs that the other ranks do not run."""
    token = alone.set(True)
    try:
        yield
    finally:
        alone.reset(token)


def combined(outputs: Outputs) -> Any:
    """Combine results, also inside of mappings and sequences.

    What has an entry per sample is joined, whole numbers are counts and add up, other numbers are averaged by samples.
    Of other tensors and values there is one for each micro-batch.
    """
    sizes = [micro_batch.num_samples for micro_batch, _ in outputs]
    return _combine([value for _, value in outputs], sizes)


def _combine(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if len(values) == 1:
        return _detached(first)
    if isinstance(first, Tensor):
        return _combine_tensors([value.detach() for value in values], sizes)
    if isinstance(first, np.ndarray):
        made = _combine_tensors(list(map(torch.as_tensor, values)), sizes)
        return made.numpy() if isinstance(made, Tensor) else [each.numpy() for each in made]
    if isinstance(first, Mapping):
        return {key: _combine([value[key] for value in values], sizes) for key in first}
    if isinstance(first, list | tuple):
        return _combine_items(values, sizes)
    if isinstance(first, Integral) and not isinstance(first, bool):
        return sum(values)
    if isinstance(first, Number) and not isinstance(first, bool):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    return first if all(value is None or value == first for value in values) else values


def _combine_items(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    of_samples = all(len(value) == size for value, size in zip(values, sizes, strict=True))
    if of_samples and not any(isinstance(item, Tensor | np.ndarray) for item in first):
        return type(first)(itertools.chain(*values))
    if all(len(value) == len(first) for value in values):
        return type(first)(_combine(list(items), sizes) for items in zip(*values, strict=True))
    return values


def _combine_tensors(values: list[Tensor], sizes: list[int]) -> Any:
    if all(value.dim() > 0 and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if len({value.shape for value in values}) > 1:
        return values
    if values[0].is_floating_point():
        return weighted_mean(values, sizes)
    counts = values[0].dim() == 0 and values[0].dtype != torch.bool and not values[0].is_complex()
    return torch.stack(values).sum(dtype=values[0].dtype) if counts else torch.stack(values)


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Mean by samples, in the values' dtype, computed in float64."""
    total = sum(value.detach().double() * size for value, size in zip(values, sizes, strict=True))
    assert isinstance(total, Tensor)
    return (total / sum(sizes)).to(values[0].dtype)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


def losses_of(outputs: Outputs) -> list[Tensor]:
    """The losses of the micro-batches that the step has not skipped."""
    return [value["loss"] if isinstance(value, Mapping) else value for _, value in outputs if value is not None]


def loss_and_rest(outputs: Outputs) -> tuple[Tensor, dict[str, Any]]:
    """The mini-batch's loss, zero if the step skipped it, and the rest of the dict that a training step returned."""
    outputs = [output for output in outputs if output[1] is not None]
    if not outputs:
        return torch.zeros(()), {}
    losses = losses_of(outputs)
    rest = [
        (part, {key: item for key, item in value.items() if key != "loss"})
        for part, value in outputs
        if isinstance(value, Mapping)
    ]
    loss = weighted_mean(losses, [micro_batch.num_samples for micro_batch, _ in outputs])
    return loss, combined(rest) if rest else {}
