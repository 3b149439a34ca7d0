"""Evaluation: steps on micro-batches, in which mini-batches follow each other without a flush, or as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_gpp.errors import CaptureError, GPPError, NoNetworkError, PlanError, ShapeError
from lightning_gpp.training.data.batches import Feed, Segments, outline
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.runner import Runner, combined
from lightning_gpp.training.session import Session
from lightning_gpp.training.sessions import Sessions
from lightning_gpp.training.tensors.gathered import Door
from lightning_gpp.training.whole.whole_step import WholeStep, capture_whole, may_evaluate_whole, why_whole
from lightning_gpp.wording import sentence

log = logging.getLogger(__name__)

_CANNOT_BE_CUT = (CaptureError, ShapeError, PlanError)
"""Errors of steps that cannot run on micro-batches, or that go through stages more than once."""


class EvaluationPass:
    """Numbers the mini-batches of one feed, and divides them into segments.

    Args:
        incoming: announces the mini-batches.
        first: number of the first mini-batch.

    Attributes:
        number: number of the next mini-batch.
    """

    def __init__(self, incoming: Incoming, first: int) -> None:
        self._incoming, self._feed = incoming, incoming.feed
        self._segments = Segments(first)
        self._session: Session | None = None
        self.number = first

    @property
    def is_over(self) -> bool:
        """True if the announced mini-batch comes from another feed."""
        return self._incoming.feed is not self._feed

    def segment(self, session: Session, *, alone: bool) -> range:
        """The segment of the next mini-batch, which was announced. Unknown mini-batches cannot be ahead.

        `alone`: the feed is not that of this evaluation, so the next mini-batches are unknown.
        """
        incoming, self._session = self._incoming, session
        known_ahead = session.lead(incoming.batch_size) <= incoming.feed.ahead()
        return self._segments.enter(self.number, incoming.facts, None if known_ahead and not alone else 1)

    def end(self) -> None:
        """Drop the mini-batches in the pipeline, which exist if a loop was left before its end."""
        if self._session is None or self._session.latest is None:
            return
        program = self._session.latest.program
        if batches := self._segments.on_their_way(self.number, program.lead):
            self._session.give_up(program.batch_size, batches)


class EvaluationSteps:
    """Runs evaluation steps, each on micro-batches or, if it cannot, as a whole. All ranks call its methods together.

    Args:
        sessions: makes the sessions of steps on micro-batches.
        runner: runs mini-batches on micro-batches.
        whole: runs steps as a whole.
        door: gives all ranks the values of the others.
        as_whole: names of the steps that run as a whole from the beginning.
        training: the feed of training, whose mini-batches are not those of an evaluation.
        num_steps: returns the number of mini-batches trained so far.

    Attributes:
        under_way: the evaluation that runs; None outside of one.
    """

    def __init__(
        self,
        sessions: Sessions,
        runner: Runner,
        whole: WholeStep,
        door: Door,
        *,
        as_whole: Iterable[str],
        training: Feed,
        num_steps: Callable[[], int],
    ) -> None:
        self._job, self._layout, self._incoming = sessions.job, sessions.layout, sessions.incoming
        self._runner, self._whole, self._as_whole = runner, whole, {*as_whole}
        self._training, self._num_steps = training, num_steps
        self._door, self._summoning = door, set[str]()
        self.under_way: EvaluationPass | None = None

    def runs_whole(self, step: str) -> bool:
        """True for a step that runs as a whole, whose mini-batches all ranks need."""
        return step in self._as_whole

    @property
    def number(self) -> int | None:
        """The number of the next mini-batch; None before the first one."""
        return None if self.under_way is None else self.under_way.number

    def run(self, step: str, arguments: Sequence[Any]) -> Any:
        """Run a step on a mini-batch, which was announced, or is on all ranks for a step as a whole."""
        if self.runs_whole(step):
            return self._run_whole(step, arguments)
        current = self._current()
        try:
            session = self._runner.session(step, arguments)
        except _CANNOT_BE_CUT as error:
            refused = error
        else:
            return self._run_cut(session, current, arguments)
        self.end()
        if not may_evaluate_whole(self._job.options, self._layout.plan):
            raise refused
        return self._run_whole(step, self._whole_from_now_on(step, arguments, refused))

    def _run_cut(self, session: Session, current: EvaluationPass, arguments: Sequence[Any]) -> Any:
        if session.streams:
            segment = current.segment(session, alone=self._incoming.feed is self._training)
            outputs = self._runner.ahead(session, arguments, 1.0, current.number, segment)
        else:
            outputs = self._runner.flushed(session, arguments, 1.0, current.number)
        current.number += 1
        return combined(outputs) if outputs else None

    def hand_out(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a step as a whole, with the mini-batch of the rank that loads it, on all ranks."""
        batch, *rest = arguments
        shared = self._whole.share(batch)
        self._job.host.received(shared)
        return [shared, *rest]

    def end(self) -> None:
        """Drop the mini-batches in the pipeline."""
        if self.under_way is not None:
            self.under_way.end()
            self.under_way = None

    def _whole_from_now_on(self, step: str, arguments: Sequence[Any], refused: GPPError) -> list[Any]:
        """Let a step that cannot run on micro-batches run as a whole, if need be with all values on every rank."""
        shared = self.hand_out(arguments)
        why: Callable[[GPPError, str], str] = why_whole
        if not self._has_calls(step, outline(shared[0])):
            if self._door.locked or self._job.control.num_devices == 1:
                raise refused
            self._summoning.add(step)
            why = _why_summoning
        self._as_whole.add(step)
        self._job.control.warn(why(refused, step))
        return shared

    def _has_calls(self, step: str, example: Any) -> bool:
        """True if all that a step needs of other ranks are network calls."""
        try:
            _, found = capture_whole(self._job, example, step=step)
        except NoNetworkError:
            return True
        except (CaptureError, ShapeError) as error:
            log.info("The %s cannot run as a whole, either: %s", step, error)
            return False
        return not found.states

    def _run_whole(self, step: str, arguments: Sequence[Any]) -> Any:
        module, control = self._job.module, self._job.control
        around = self._door.open(module) if step in self._summoning else self._whole.running(self._num_steps())
        with around, control.mesh.peers(), self._job.host.context(step)():
            return getattr(module, step)(*arguments)

    def _current(self) -> EvaluationPass:
        if self.under_way is not None and self.under_way.is_over:
            self.end()
        if self.under_way is None:
            self.under_way = EvaluationPass(self._incoming, self._num_steps())
        return self.under_way


def _why_summoning(refused: GPPError, step: str) -> str:
    name, reason = step.replace("_", " "), sentence(getattr(refused, "reason", "") or refused)
    return (
        f"The {name} runs on every rank, to which the others send the values of their parameters for each mini-batch, "
        f"because it can run neither on micro-batches nor as a whole (docs/howto/evaluate.md). {reason} Every device "
        "needs memory for the undivided module."
    )
