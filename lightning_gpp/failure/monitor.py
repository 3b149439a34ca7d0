"""The failure monitor: one rank's failure ends all ranks, every rank prints the first cause, and no process remains.

A rank that fails in a pipeline leaves the others in receives that never end. The timeout of the process group must be
longer than the longest legitimate wait (compiling a first step, writing a checkpoint), so it detects a failure late and
names the wrong rank, the one that waited. Here, every rank has a watch (`watch`) over the others:

* a rank reports the exception that it raised; if all raise it at the same point, each handles it, and nothing ends,
* a process that ends without a report (killed, `os._exit`) is noticed by those on its machine, as soon as it has ended,
* a stopped process, or one whose machine is gone, is noticed by its missing heartbeats,
* every rank prints the first of these, and ends its own process: the main thread may wait in a receive for ever.

No rank ends another one: what is left is the launcher's.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they have no types

from lightning_gpp._compat.torch import default_store
from lightning_gpp.errors import GPPError, PeerFailure, add_note
from lightning_gpp.failure.chair import PATIENCE
from lightning_gpp.failure.processes import exit_now, say, show_crashes
from lightning_gpp.failure.report import EXIT_CODE, Cause, is_consequence, point_of, record, short_trace, told
from lightning_gpp.failure.watch import ANSWER, SUSPICION, Watch
from lightning_gpp.user_code import with_user_lines

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""
_CONSEQUENCE_GRACE: Final = SUSPICION + 1.5
"""Seconds that a communication error waits for its cause to be known."""
_REMINDER: Final = 30.0
"""Seconds after which rank 0 says whom it waits for."""
_END: Final = 60.0
"""Seconds for which ranks wait for each other at the end."""
_runs: Final = itertools.count()
"""Numbers the watches of this process; all ranks start them in the same order."""


class FailureMonitor(Watch):
    """Watches over the ranks of a job, from `start` to `stop`. See `Watch` for its arguments."""

    _ended_by: ClassVar[Cause | None] = None
    """The failure of an earlier run, which this process has caught; the other ranks have ended."""
    _is_watching = False
    _reported: tuple[BaseException, bool] | None = None
    _excepthook: Callable[..., Any]

    def start(self, store: Store | None = None) -> FailureMonitor:
        """Watch, through a store of all ranks; default: that of the default process group. All ranks call it together.

        Raises:
            PeerFailure: a rank does not come.
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
        shared: Any = default_store() if store is None else store
        own = PrefixStore(f"gpp watch {next(_runs)}", shared.clone())
        own.set_timeout(timedelta(seconds=self.limits.patience))
        try:
            self._begin(own)
        except dist.DistError as error:
            raise PeerFailure(
                f"Rank 0 has not started its failure monitor ({error}). Its process has ended, or has not come so far: "
                "look at its output."
            ) from error
        self._is_watching = True
        self._excepthook, sys.excepthook = sys.excepthook, self._on_uncaught
        if self.rank == 0:
            self._wait_for_all()
        return self

    def _wait_for_all(self) -> None:
        """On rank 0: who has come is watched, and hears of this rank, while others are missing."""
        began, reminded, patience = time.monotonic(), False, self.limits.patience
        while not self._complete.wait(0.1):
            waited = time.monotonic() - began
            if waited > patience:
                error = PeerFailure(
                    f"The failure monitors of ranks {self._missing()} did not start within {patience:.0f} s. "
                    "Their processes have ended, which their own output explains, or cannot reach rank 0's host "
                    "(MASTER_ADDR, firewall)."
                )
                self.report(error)
                raise error
            if waited > _REMINDER and not reminded:
                say(f"[rank 0] Waiting for ranks {self._missing()}, which have not started yet.")
                reminded = True

    def _missing(self) -> list[int]:
        """On rank 0 the ranks that have not come yet."""
        return sorted({*range(1, self.world_size)} - self._peers.keys())

    def report(self, error: BaseException) -> bool:
        """Tell the others that this rank has raised `error`. Returns if the caller is to raise it.

        That is so if it is the first cause of the job's end, and if all other ranks raise theirs at the same point:
        then each handles its own, and the watch goes on. An error that may only follow from the end of another rank
        waits for that cause. If another rank failed first, this process ends here; likewise after `sys.exit(0)` on some
        ranks only, which would pass for success.

        Returns:
            True if all ranks have raised it at the same point of the program, so that they can go on to communicate.
        """
        if not self._is_watching or os.getpid() != self._process.pid:
            return False
        if self._reported is None or self._reported[0] is not error:
            if isinstance(error, GPPError) or is_consequence(error):  # a sentence, here or of the cause, says all
                self._show_as(error, lambda usual: usual(type(error), with_user_lines(error), error.__traceback__))
            self._reported = error, self._is_of_all(error)
        together = self._reported[1]
        if not together:
            self._let_all_know()
        record(error)
        if isinstance(error, SystemExit) and not error.code and not together:
            exit_now(EXIT_CODE)
        return together

    def _let_all_know(self) -> None:
        """Let the first cause be known everywhere; returns only if it is of this rank."""
        self._wait_for_others()
        if self.cause is not None and self.cause.rank != self.rank:
            self._wait_for_the_end()
        FailureMonitor._ended_by = self.cause

    def has_shown(self, error: BaseException) -> bool:
        """True if the job ends because of this error of this rank, which has said so."""
        return self._reported == (error, False)

    def _is_of_all(self, error: BaseException) -> bool:
        """Report an exception of this rank. Returns True if all ranks have raised it."""
        event, point = f"raised {told(error)}", point_of(error)
        if is_consequence(error):
            self._say(suspects=True)
            if self._known.wait(_CONSEQUENCE_GRACE):
                return False
            self._propose(self._cause(event, short_trace(error)))
        elif isinstance(error, KeyboardInterrupt):
            self._say_raised(self._cause("was interrupted", point=point, code=INTERRUPTED))
        else:
            explains_itself = isinstance(error, GPPError)  # and its own rank shows the traceback as Python does
            self._say_raised(self._cause(event, "" if explains_itself else short_trace(error), point))
        self._judged.wait(PATIENCE + self.limits.exit_grace)
        if (first := self._first) is None:
            return False
        if first.event != event:
            add_note(error, f"All ranks have raised exceptions. First cause: {first}")  # shown if nobody catches it
        elif first.rank != self.rank:
            repeated = f"[rank {self.rank}] {type(error).__name__}, as on rank {first.rank}, which shows it."
            self._show_as(error, lambda usual: say(repeated))
        return True

    def _say_raised(self, cause: Cause) -> None:
        self._first = None
        self._judged.clear()
        self._say(raised=asdict(cause))

    def _show_as(self, error: BaseException, show: Callable[[Callable[..., Any]], None]) -> None:
        """Show an error that nobody catches in another way than `usual`, which shows all others."""
        usual = self._excepthook
        self._excepthook = lambda *uncaught: show(usual) if uncaught[1] is error else usual(*uncaught)

    def _cause(self, event: str, trace: str = "", point: str = "", code: int = EXIT_CODE) -> Cause:
        return Cause(
            rank=self.rank,
            process=self._process,
            action=self._progress.describe(),
            event=event,
            reported=True,
            traceback=trace,
            code=code,
            point=point,
        )

    def ask_to_stop(self, number: int) -> None:
        """Tell rank 0, without waiting, that this rank has received a signal that asks the job to stop."""
        self.stop_signal = self.stop_signal or number
        self._say(stop=self.stop_signal)

    def fail(self, event: str, code: int = EXIT_CODE) -> None:
        """Tell the others that this rank fails by `event`, a verb phrase, not an exception. Returns when they know.

        `code`: the exit code of all other ranks.
        """
        if self._is_watching:
            self._propose(self._cause(event, code=code))
            self._known.wait(self.limits.exit_grace)
            self._wait_for_others()

    def stop(self) -> None:
        """End the watch. Ranks may do so at different times: they wait up to a minute for each other.

        Does nothing after a failure of this rank, so that the error can be raised. After a failure of another rank the
        process ends here.
        """
        was_watching, self._is_watching, self._reported = self._is_watching, False, None
        if not was_watching or os.getpid() != self._process.pid:
            return
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._excepthook
        if self.cause is None:
            self._finish(_END)
        if self.cause is not None and self.cause.rank != self.rank:
            self._wait_for_the_end()

    def _finish(self, patience: float) -> None:
        """Report the regular end of this rank. Returns when all have ended, or after `patience` seconds.

        Until then a rank that is stopped is noticed. Rank 0, whose process may serve the store, is the last.
        """
        self._say(done=True)
        self._finished.wait(patience)
        self._finished.set()
        self._gone.wait(ANSWER)
        if self.cause is None:
            self._gone.set()

    def _wait_for_others(self) -> None:
        """Let the others read the cause before the process that serves the store ends."""
        if self.rank == 0:
            self._gone.wait(ANSWER)

    def __enter__(self) -> FailureMonitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.report(error)
        self.stop()

    def _wait_for_the_end(self) -> None:
        """Wait for the watch to end the process: this thread must not communicate with dead ranks."""
        threading.Event().wait(self.limits.exit_grace)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report(error)
        self._excepthook(kind, error, trace)
