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
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they have no types

from lightning_gpp._compat.torch import default_store
from lightning_gpp.errors import GPPError, PeerFailure, add_note
from lightning_gpp.failure.chair import PATIENCE
from lightning_gpp.failure.hangs import Activity
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.processes import ProcessIdentity, exit_now, say, show_crashes
from lightning_gpp.failure.report import EXIT_CODE, Cause, is_consequence, point_of, record, short_trace, told
from lightning_gpp.failure.watch import SUSPICION, Watch

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


class FailureMonitor:
    """Watches over the ranks of a job, from `start` to `stop`.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limits: times.
        activity: of this rank (`2F1, training`).
        before_exit: called before the watch ends this process, for those that it has started.
    """

    _ended_by: ClassVar[Cause | None] = None
    """The failure of an earlier run, which this process has caught; the other ranks have ended."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        limits: Limits | None = None,
        activity: Activity | None = None,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size, self.limits = rank, world_size, limits or Limits()
        self._activity, self._before_exit = activity or Activity(), before_exit
        self._watch: Watch | None = None
        self._reported: tuple[BaseException, bool] | None = None
        self._process = ProcessIdentity.current()
        self._excepthook: Callable[..., Any] = sys.excepthook

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
        self._process = ProcessIdentity.current()
        self._watch = self._begin(store if store is not None else default_store())
        if self.rank == 0:
            self._wait_for_all(self._watch)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_uncaught
        return self

    def _begin(self, store: Store) -> Watch:
        own = PrefixStore(f"gpp watch {next(_runs)}", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
        own.set_timeout(timedelta(seconds=self.limits.patience))
        watch = Watch(
            own,
            rank=self.rank,
            world_size=self.world_size,
            limits=self.limits,
            activity=self._activity,
            before_exit=self._before_exit,
        )
        try:
            watch.begin()
        except dist.DistError as error:
            raise PeerFailure(
                f"Rank 0 has not started its failure monitor ({error}). Its process has ended, or has not come so far: "
                "look at its output."
            ) from error
        return watch

    def _wait_for_all(self, watch: Watch) -> None:
        """On rank 0: who has come is watched, and hears of this rank, while others are missing."""
        began, reminded, patience = time.monotonic(), False, self.limits.patience
        while not watch.complete.wait(0.1):
            waited = time.monotonic() - began
            if waited > patience:
                error = PeerFailure(
                    f"The failure monitors of ranks {watch.missing()} did not start within {patience:.0f} s. "
                    "Their processes have ended, which their own output explains, or cannot reach rank 0's host "
                    "(MASTER_ADDR, firewall)."
                )
                self.report(error)
                raise error
            if waited > _REMINDER and not reminded:
                say(f"[rank 0] Waiting for ranks {watch.missing()}, which have not started yet.")
                reminded = True

    def report(self, error: BaseException) -> bool:
        """Tell the others that this rank has raised `error`. Returns if the caller is to raise it.

        That is so if it is the first cause of the job's end, and if all other ranks raise theirs at the same point:
        then each handles its own, and the watch goes on. An error that may only follow from the end of another rank
        waits for that cause. If another rank failed first, this process ends here; likewise after `sys.exit(0)` on some
        ranks only, which would pass for success.

        Returns:
            True if all ranks have raised it at the same point of the program, so that they can go on to communicate.
        """
        watch = self._watch
        if watch is None or os.getpid() != self._process.pid:
            return False
        if self._reported is None or self._reported[0] is not error:
            self._reported = error, self._judged(watch, error)
        together = self._reported[1]
        if not together:
            self._end(watch)
        record(error)
        if isinstance(error, SystemExit) and not error.code and not together:
            exit_now(EXIT_CODE)
        return together

    def _end(self, watch: Watch) -> None:
        """Let the first cause be known everywhere; returns only if it is of this rank."""
        watch.wait_for_others()
        if watch.cause is not None and watch.cause.rank != self.rank:
            self._wait_for_the_end()
        FailureMonitor._ended_by = watch.cause

    def has_shown(self, error: BaseException) -> bool:
        """True if the job ends because of this error of this rank, which has said so."""
        return self._reported == (error, False)

    def _judged(self, watch: Watch, error: BaseException) -> bool:
        """Report an exception of this rank. Returns True if all ranks have raised it."""
        event, point = f"raised {told(error)}", point_of(error)
        if is_consequence(error):
            watch.suspect()
            if watch.known.wait(_CONSEQUENCE_GRACE):
                return False
            watch.propose(self._cause(event, short_trace(error)))
        elif isinstance(error, KeyboardInterrupt):
            watch.report(self._cause("was interrupted", point=point, code=INTERRUPTED))
        else:
            explains_itself = isinstance(error, GPPError)  # and its own rank shows the traceback as Python does
            watch.report(self._cause(event, "" if explains_itself else short_trace(error), point))
        watch.judged.wait(PATIENCE + self.limits.exit_grace)
        if (first := watch.first) is None:
            return False
        words = f"Rank {first.rank} raised this one first." if first.event == event else f"First cause: {first}"
        add_note(error, f"All ranks have raised exceptions. {words}")  # shown only if nobody catches it
        if self.rank and first.event == event and isinstance(error, GPPError):
            self._excepthook = partial(self._show_repeated, error, self._excepthook)
        return True

    def _show_repeated(self, repeated: GPPError, usual: Callable[..., Any], *uncaught: Any) -> None:
        """Show an error that nobody catches: in a line, if rank 0 shows its traceback."""
        if uncaught[1] is repeated:
            say(f"[rank {self.rank}] {type(repeated).__name__}, as on rank 0, which shows it.")
        else:
            usual(*uncaught)

    def _cause(self, event: str, trace: str = "", point: str = "", code: int = EXIT_CODE) -> Cause:
        return Cause(
            rank=self.rank,
            process=self._process,
            action=self._activity.describe(),
            event=event,
            reported=True,
            traceback=trace,
            code=code,
            point=point,
        )

    def ask_to_stop(self, number: int) -> None:
        """Tell rank 0, without waiting, that this rank has received a signal that asks the job to stop."""
        if self._watch is not None:
            self._watch.ask_to_stop(number)

    @property
    def stop_signal(self) -> int:
        """The first signal that asks the job to stop, 0 if there is none; on rank 0 of any rank, elsewhere its own."""
        return 0 if self._watch is None else self._watch.stop_signal

    def fail(self, event: str, code: int = EXIT_CODE) -> None:
        """Tell the others that this rank fails by `event`, a verb phrase, not an exception. Returns when they know.

        `code`: the exit code of all other ranks.
        """
        if (watch := self._watch) is not None:
            watch.propose(self._cause(event, code=code))
            watch.known.wait(self.limits.exit_grace)
            watch.wait_for_others()

    def stop(self) -> None:
        """End the watch. Ranks may do so at different times: they wait up to a minute for each other.

        Does nothing after a failure of this rank, so that the error can be raised. After a failure of another rank the
        process ends here.
        """
        watch, self._watch = self._watch, None
        self._reported = None
        if watch is None or os.getpid() != self._process.pid:
            return
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._excepthook
        if watch.cause is None:
            watch.finish(_END)
        if watch.cause is not None and watch.cause.rank != self.rank:
            self._wait_for_the_end()

    @property
    def cause(self) -> Cause | None:
        """The first cause of the job's failure; None until it is known here."""
        return self._watch.cause if self._watch is not None else None

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
