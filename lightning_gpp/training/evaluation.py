"""Evaluation: steps on micro-batches, in which mini-batches follow each other without a flush, or as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_gpp.errors import CaptureError, GPPError, NoNetworkError, PlanError, ShapeError
from lightning_gpp.training.data.batches import Feed, Segments, outline
from lightning_gpp.training.runner import Runner, combined
from lightning_gpp.training.session import Session
from lightning_gpp.training.sessions import Sessions
from lightning_gpp.training.tensors.gathered import Door
from lightning_gpp.training.whole.network_calls import Otherwise
from lightning_gpp.training.whole.whole_step import WholeStep, capture_whole, may_evaluate_whole, why_whole
from lightning_gpp.wording import named, sentence

log = logging.getLogger(__name__)

_CANNOT_BE_CUT = (CaptureError, ShapeError, PlanError)
"""Errors of steps that cannot run on micro-batches, or that go through stages more than once."""


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
        number: number of the next mini-batch; None outside of an evaluation.
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
        self.number: int | None = None
        self._feed, self._segments = sessions.incoming.feed, Segments(0)
        self._streamed: Session | None = None

    def runs_whole(self, step: str) -> bool:
        """True for a step that runs as a whole, whose mini-batches all ranks need."""
        return step in self._as_whole

    def run(self, step: str, arguments: Sequence[Any]) -> Any:
        """Run a step on a mini-batch, which was announced, or is on all ranks for a step as a whole."""
        if self.runs_whole(step):
            return self._run_whole(step, arguments)
        number = self._begun()
        try:
            session = self._runner.session(step, arguments)
        except _CANNOT_BE_CUT as error:
            refused = error
        else:
            return self._run_cut(session, number, arguments)
        self.end()
        if not may_evaluate_whole(self._job.options, self._layout.plan):
            raise refused
        return self._run_whole(step, self._whole_from_now_on(step, arguments, refused))

    def _run_cut(self, session: Session, number: int, arguments: Sequence[Any]) -> Any:
        if session.streams:
            self._streamed, incoming = session, self._incoming
            known = session.lead(incoming.batch_size) <= incoming.feed.ahead() and incoming.feed is not self._training
            segment = self._segments.enter(number, incoming.facts, None if known else 1)  # unknown ones cannot be ahead
            outputs = self._runner.ahead(session, arguments, 1.0, number, segment)
        else:
            outputs = self._runner.flushed(session, arguments, 1.0, number)
        self.number = number + 1
        return combined(outputs) if outputs else None

    def hand_out(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a step as a whole, with the mini-batch of the rank that loads it, on all ranks."""
        batch, *rest = arguments
        shared = self._whole.share(batch)
        self._job.host.received(shared)
        return [shared, *rest]

    def end(self) -> None:
        """Drop the mini-batches in the pipeline, which exist if a loop was left before its end."""
        session, number = self._streamed, self.number
        self.number = self._streamed = None
        if session is None or session.latest is None or number is None:
            return
        program = session.latest.program
        if batches := self._segments.on_their_way(number, program.lead):
            session.give_up(program.batch_size, batches)

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
        running = partial(self._whole.running, self._num_steps(), self._otherwise(step))
        around = self._door.open(module) if step in self._summoning else running()
        with around, control.mesh.peers(), self._job.host.context(step)():
            return getattr(module, step)(*arguments)

    def _otherwise(self, step: str) -> Otherwise | None:
        """Answers calls that get objects; None if this rank has all values, or values cannot be gathered."""
        there = self._door.locked or self._job.control.num_devices == 1
        return None if there else partial(self._with_values, step)

    def _with_values(
        self, step: str, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call that gets an object, as those of `generate` get a cache, with all values on every rank. From the
        next mini-batch on, the step has them from its beginning.
        """
        if step not in self._summoning:
            self._summoning.add(step)
            reason = f"A call of {named(path)} gets an object, which may hold tensors."
            self._job.control.warn(_why_summoning(CaptureError(reason), step))
        with self._door.open(module):
            return module(*args, **kwargs)

    def _begun(self) -> int:
        """The number of the announced mini-batch, the first one if it comes from another feed than the one before."""
        feed = self._incoming.feed
        if feed is not self._feed:
            self.end()
        if self.number is None:
            self.number = self._num_steps()
            self._feed, self._segments = feed, Segments(self.number)
        return self.number


def _why_summoning(refused: GPPError, step: str) -> str:
    name, reason = step.replace("_", " "), sentence(getattr(refused, "reason", "") or refused)
    return (
        f"The {name} runs on every rank, to which the others send the values of their parameters for each mini-batch, "
        f"because it can run neither on micro-batches nor as a whole (docs/howto/evaluate.md). {reason} Every device "
        "needs memory for the undivided module."
    )
