"""The failure monitor: one rank's failure ends all ranks, every rank prints the first cause, and no process remains.

A rank that fails in a pipeline leaves the others in receives that never end. The timeout of the process group must be
longer than the longest legitimate wait (compiling a first step, writing a checkpoint), so it detects a failure late and
names the wrong rank, the one that waited. Here, every rank has a thread that is connected with rank 0's (`links`):

* a rank reports the exception that it raised; if all ranks raise their own, each handles it, and nothing ends,
* a process that ends without a report (killed, `os._exit`) is noticed at once, by its closed connection,
* a stopped process is noticed after `timeout` seconds, by its missing heartbeats, and killed by the ranks on its host,
* every rank prints the first of these, and its thread (`watch`) ends the process with exit code 1: the main thread may
  wait in a receive for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta
from types import TracebackType
from typing import ClassVar, Final

import torch.distributed as dist

from lightning_gpp.errors import GPPError, PeerFailure, add_note
from lightning_gpp.failure import torchrun
from lightning_gpp.failure.cause import EXIT_CODE, Cause
from lightning_gpp.failure.exceptions import PATIENCE, Verdict, point_of
from lightning_gpp.failure.handshake import Exchange, Listener, connect, exchange_through
from lightning_gpp.failure.hangs import Activity, HangReports
from lightning_gpp.failure.links import PeerLink
from lightning_gpp.failure.processes import ProcessIdentity, exit_now, show_crashes
from lightning_gpp.failure.watch import Watcher
from lightning_gpp.user_code import UNKNOWN, is_own_code, is_user_code, line_of

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""
_CONSEQUENCE_GRACE: Final = PATIENCE + 0.5
"""Seconds that a communication error waits for its cause to arrive."""
_LATE: Final = 3.0
"""Seconds for which a rank that fails waits to be connected; on rank 0, for ranks that have not come yet."""
_CONSEQUENCES: Final = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "gloo")
_START: Final = 300.0
"""Seconds for all ranks to start: imports from a busy file server take minutes."""
_END: Final = 60.0
"""Seconds for which ranks wait for each other at the end."""
_HEARTBEATS: Final = 5
"""The time limit for the end of all ranks, divided by this, is the silence after which a rank counts as stopped."""
_HANG: Final = 0.9
"""Part of the time limit of collectives after which a rank that does not move is reported."""
_SHORT: Final = 8
"""Innermost frames of a traceback that are sent to the other ranks."""


class FailureMonitor:
    """Watches over the ranks of a job, from `start` to `stop`.

    `timeout`: seconds without a heartbeat after which a rank counts as stopped. It must exceed the longest time for
    which no thread of a rank runs (a C call that holds the interpreter's lock). None or 0: silence is not a failure
    (for debuggers), but exceptions and ends of processes are. `activity` says what this rank does (`2F1, training`).
    `exit_grace`: seconds for a failed rank to print its traceback and end by itself, before it is ended. `patience`:
    seconds for all ranks to connect at the start. `hang`: seconds in one activity after which all ranks report where
    they are.
    """

    _ended_by: ClassVar[Cause | None] = None
    """The failure of an earlier run, which this process has caught; the other ranks have ended."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout: float | None = 12.0,
        activity: Activity | None = None,
        exit_grace: float = 5.0,
        patience: float = 60.0,
        hang: float = float("inf"),
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout or 0.0
        self._activity, self._hang = activity or Activity(), hang
        self._exit_grace = exit_grace
        self.patience = patience
        self._watcher: Watcher | None = None
        self._here = threading.Event()
        """Set once this rank could tell others of a failure."""
        self._all_here = threading.Event()
        """Set once all ranks have come, on rank 0; on the others once they have reached it."""
        self._stop_signal = 0
        self._reported: tuple[BaseException, Verdict] | None = None
        self._process = ProcessIdentity.current()
        self._excepthook = sys.excepthook

    @classmethod
    def within(
        cls, limit: timedelta, *, rank: int, world_size: int, activity: Activity, collectives: timedelta
    ) -> FailureMonitor:
        """A monitor that ends all ranks within about `limit` after one of them failed.

        `collectives`: the time after which collectives give up; hangs are reported shortly before.
        """
        seconds = limit.total_seconds()
        return cls(
            rank=rank,
            world_size=world_size,
            timeout=seconds / _HEARTBEATS,
            activity=activity,
            hang=_HANG * collectives.total_seconds(),
            exit_grace=min(5.0, seconds / _HEARTBEATS),
            patience=max(_START, seconds),
        )

    def start(self, exchange: Exchange | None = None) -> FailureMonitor:
        """Connect and watch. All ranks call it at the same point.

        `exchange` makes rank 0's address known to all; default: a broadcast in the default process group.

        Raises:
            PeerFailure: a rank cannot be reached.
            GPPError: the other ranks have ended after a failure of this one.
        """
        if self.world_size == 1:
            return self
        if cause := FailureMonitor._ended_by:
            raise GPPError(
                f"The other ranks of this job have ended. First cause: {cause}. This process has caught its exception, "
                "and cannot go on alone: start the script again."
            )
        show_crashes()
        self._process, exchange = ProcessIdentity.current(), exchange or exchange_through()
        links = {} if self.rank == 0 else connect(exchange(None), self.rank, self.patience)
        self._watcher = self._watch(links)
        self._here.set()
        if self._stop_signal:
            self._watcher.ask_to_stop(self._stop_signal)
        if self.rank == 0:
            self._let_in(self._watcher, exchange)
        self._all_here.set()
        self._excepthook, sys.excepthook = sys.excepthook, self._on_uncaught
        return self

    def report(self, error: BaseException) -> bool:
        """Tell the others that this rank has raised `error`. Returns if the caller is to raise it.

        That is so if it is the first cause of the job's end, and if all other ranks raise exceptions of their own at
        about the same time: then each handles its own, and the watch goes on. An error that may only follow from the
        end of another rank waits for that cause. If another rank failed first, this process ends here; likewise after
        `sys.exit(0)` on some ranks only, which would pass for success.

        Returns:
            True if all ranks have raised it at the same point of the program, so that they can go on to communicate.
        """
        watcher = self._watcher
        if watcher is None or not watcher.is_alive() or os.getpid() != self._process.pid:
            return False
        if self._reported is None or self._reported[0] is not error:
            self._reported = error, self._judged(watcher, error)
        verdict = self._reported[1]
        if verdict is Verdict.ENDS and watcher.cause is not None and watcher.cause.rank != self.rank:
            self._wait_for_the_end()
        if verdict is Verdict.ENDS:
            FailureMonitor._ended_by = watcher.cause
        torchrun.record(error)
        if isinstance(error, SystemExit) and not error.code and verdict is Verdict.ENDS:
            exit_now(EXIT_CODE)
        return verdict is Verdict.TOGETHER

    def has_shown(self, error: BaseException) -> bool:
        """True if the job ends because of this error of this rank, which has said so."""
        return self._reported == (error, Verdict.ENDS)

    def _judged(self, watcher: Watcher, error: BaseException) -> Verdict:
        """Report an exception of this rank, and return its consequence."""
        follows = _is_consequence(error)
        if follows and watcher.known.wait(_CONSEQUENCE_GRACE):
            return Verdict.ENDS
        point, event = "" if follows else point_of(error), f"raised {_told(error)}"
        if isinstance(error, KeyboardInterrupt):
            self._submit(watcher, "was interrupted", point=point, code=INTERRUPTED)
        else:
            explains_itself = isinstance(error, GPPError)  # and its own rank shows the traceback as Python does
            self._submit(watcher, event, "" if explains_itself else _short_trace(error), point)
        watcher.judged.wait(PATIENCE + self._exit_grace)
        verdict = watcher.verdict or Verdict.ENDS
        if verdict is not Verdict.ENDS:  # shown only if nobody catches it
            first = watcher.first
            told = (
                f"Rank {first.rank} raised this one first."
                if first and first.event == event
                else f"First cause: {first}"
            )
            add_note(error, f"All ranks have raised exceptions. {told}")
        return verdict

    def ask_to_stop(self, number: int) -> None:
        """Tell rank 0, without waiting, that this rank has received a signal that asks the job to stop.

        Before the start it is kept until then.
        """
        self._stop_signal = self._stop_signal or number
        if self._watcher is not None:
            self._watcher.ask_to_stop(number)

    def ask_to_finish(self) -> None:
        """Tell rank 0, without waiting, that this rank wants the job to end regularly after one of the next steps."""
        if self._watcher is not None:
            self._watcher.ask_to_finish()

    @property
    def asked_to_finish(self) -> bool:
        """On rank 0 True if any rank wants the job to end regularly."""
        return self._watcher is not None and self._watcher.asked_to_finish

    @property
    def stop_signal(self) -> int:
        """The first signal that asks the job to stop, 0 if there is none; on rank 0 of any rank, elsewhere its own."""
        return (self._watcher.stop_signal if self._watcher is not None else 0) or self._stop_signal

    def fail(self, event: str, code: int = EXIT_CODE) -> None:
        """Tell the others that this rank fails by `event`, a verb phrase, not an exception. Returns when they know.

        For another thread than the one that calls `start`, which has a few seconds to connect this rank with the
        others, and on rank 0 those that have not come yet.

        `code`: the exit code of all other ranks.
        """
        if self.world_size > 1:
            self._here.wait(_LATE)
        watcher = self._watcher
        if watcher is None or not watcher.is_alive():
            return
        self._submit(watcher, event, code=code)
        watcher.known.wait(self._exit_grace)
        if self._all_here.wait(_LATE):  # who comes now is told; later nobody would answer
            watcher.catch_up(self._exit_grace)

    def _submit(self, watcher: Watcher, event: str, trace: str = "", point: str = "", code: int = EXIT_CODE) -> None:
        cause = Cause(
            rank=self.rank,
            process=self._process,
            action=self._activity.describe(),
            event=event,
            reported=True,
            traceback=trace,
            code=code,
            point=point,
        )
        watcher.submit(cause)

    def stop(self) -> None:
        """End the watch. Ranks may do so at different times: they wait up to a minute for each other.

        Does nothing after a failure of this rank, so that the error can be raised. After a failure of another rank the
        process ends here.
        """
        watcher, self._watcher = self._watcher, None
        self._reported = None
        if watcher is None or os.getpid() != self._process.pid:
            return
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._excepthook
        if watcher.cause is None and watcher.is_alive():
            watcher.finish(_END)
        if watcher.cause is not None and watcher.cause.rank != self.rank:
            self._wait_for_the_end()

    @property
    def cause(self) -> Cause | None:
        """The first cause of the job's failure; None until it is known here."""
        return self._watcher.cause if self._watcher is not None else None

    def __enter__(self) -> FailureMonitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.report(error)
        self.stop()

    def _watch(self, links: dict[int, PeerLink]) -> Watcher:
        watcher = Watcher(
            rank=self.rank,
            world_size=self.world_size,
            links=links,
            timeout=self.timeout,
            activity=self._activity,
            hangs=HangReports(self.rank, self.world_size, self._hang, self._activity.wait),
            exit_grace=self._exit_grace,
        )
        watcher.start()
        return watcher

    def _let_in(self, watcher: Watcher, exchange: Exchange) -> None:
        """Let the other ranks in. Who has come is watched, and hears of this rank, while others are missing."""
        listener = Listener()
        exchange(listener.address)
        try:
            listener.accept(self.world_size, self.patience, watcher.add)
        except PeerFailure as error:
            self.report(error)
            raise

    def _wait_for_the_end(self) -> None:
        """Wait for the watcher to end the process: this thread must not communicate with dead ranks."""
        threading.Event().wait(self._exit_grace)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report(error)
        self._excepthook(kind, error, trace)


def _told(error: BaseException) -> str:
    """The error, with the line of the user's code that it comes from; errors of this library say what they need."""
    told, line = f"{type(error).__name__}: {error}", line_of(error)
    return told if isinstance(error, GPPError) or line == UNKNOWN else f"{told} ({line})"


def _short_trace(error: BaseException) -> str:
    """The traceback of the user's code, and of what it calls: its innermost frames, without those of this library."""
    told = traceback.TracebackException.from_exception(error, limit=-_SHORT)
    own = [position for position, frame in enumerate(told.stack) if is_own_code(frame.filename)]
    if own and own[-1] + 1 < len(told.stack):
        del told.stack[: own[-1] + 1]
    return "".join(told.format())


def _is_of_communication(error: BaseException) -> bool:
    """True if torch or this library has raised an error, and not the user's code, which may use the same words."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or not is_user_code(frames[-1].f_code.co_filename)


def _is_consequence(error: BaseException | None) -> bool:
    """True if an error may only follow from a broken connection with another rank."""
    if error is None:
        return False
    if isinstance(error, (dist.DistError, ConnectionError, PeerFailure)):
        return True
    told = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CONSEQUENCES)
    return (told and _is_of_communication(error)) or _is_consequence(error.__cause__ or error.__context__)
