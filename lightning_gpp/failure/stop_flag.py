"""Signals that ask a job to end become a flag, which all ranks look at together between two steps.

A handler that saves or communicates wherever Python happens to be meets ranks that wait in a receive, and never ends. A
process is signalled alone, or all are at slightly different times; so the flag is agreed on by a reduction at a point
that all ranks pass, and what follows (a checkpoint, an exit code) may then be collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """While it is installed (a context manager), `signals` only set a flag. Main thread only; ValueError elsewhere.

    A main thread that waits in a receive does not run Python's handlers, and if its peer never sends, no rank reaches
    the point where the flag is looked at. So a signal that no `agreed` has answered within `patience` seconds is given
    to `overdue`, in a thread. Forked workers keep the default behaviour of `signals`.
    """

    def __init__(
        self,
        overdue: Callable[[signal.Signals], None],
        *,
        signals: Iterable[signal.Signals] = STOP_SIGNALS,
        patience: float = 30.0,
    ) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        """The signal this rank has received; of several, the one with the highest number."""
        self._overdue = overdue
        self._patience = patience
        self._answered = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._installed = False

    def __enter__(self) -> StopFlag:
        self._process, self._installed = os.getpid(), True
        for each in self.signals:
            self._previous[each] = signal.signal(each, self._receive)
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="gpp-stop-flag", daemon=True).start()
        forget = weakref.WeakMethod(self._forget_in_worker)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answered.set()
        self._installed = False
        signal.set_wakeup_fd(self._previous_wakeup)
        for each, handler in self._previous.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        self._wake.close()

    def agreed(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None
    ) -> signal.Signals | None:
        """The signal that any rank of `group` has received, on all. Collective; `device` as its backend asks."""
        number = torch.tensor(self.received or 0, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return self.answer(int(number))

    def answer(self, number: int) -> signal.Signals | None:
        """As `agreed`, for callers that reduce `received or 0` (MAX) along with other numbers."""
        if number == 0:
            return None
        self._answered.set()
        return signal.Signals(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self._installed:
            self.received = signal.Signals(max(self.received or 0, number))
            return
        # in a worker, or put back after the end by someone who had saved it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _listen(self) -> None:
        """Every signal that has a handler in Python arrives here as a byte, even while the main thread waits."""
        with self._woken:
            while number := self._woken.recv(1):
                if number[0] in self.signals:
                    return self._expect_answer(signal.Signals(number[0]))
                self._pass_on(number)
        return None

    def _expect_answer(self, number: signal.Signals) -> None:
        if not self._answered.wait(self._patience):
            self._overdue(number)

    def _pass_on(self, number: bytes) -> None:
        if self._previous_wakeup != -1:
            with contextlib.suppress(OSError):
                os.write(self._previous_wakeup, number)

    def _forget_in_worker(self) -> None:
        """A worker's signals are its own: its copy of the socket would report them to this rank."""
        with contextlib.suppress(ValueError):
            if self._installed:
                signal.set_wakeup_fd(-1)
        self._wake.close()
        self._woken.close()
