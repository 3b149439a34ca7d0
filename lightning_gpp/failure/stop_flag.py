"""The stop flag: signals that ask a job to end set a flag, which all ranks read together between two steps.

A signal handler that saves or communicates at an arbitrary point would wait for ranks that wait in a receive, for ever.
One process may be signalled alone, or all at slightly different times. So the ranks agree on the flag by a reduction
at a point that all of them pass, and what follows (a checkpoint, an exit code) may be collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_gpp.failure.processes import forget_in_workers

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """A context manager in which `signals` only set a flag. Main thread only; ValueError elsewhere.

    A main thread that waits in a receive runs no Python handlers, and if its peer never sends, no rank reaches the
    point at which the flag is read. So a thread learns of signals, too: it passes each to `heard` at once, also those
    that keep their handlers, and to `overdue` one of `signals` that nobody has answered within `patience` seconds.
    One that comes too late to be answered takes effect at the end of the context. Forked workers keep the default
    behaviour of `signals`.
    """

    def __init__(
        self,
        overdue: Callable[[signal.Signals], None],
        *,
        signals: Iterable[signal.Signals] = STOP_SIGNALS,
        patience: float = 30.0,
        heard: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        """The signal that this rank has received, the first of several."""
        self._overdue, self._heard = overdue, heard
        self._patience = patience
        self._answered = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._installed = self._expecting = False

    def __enter__(self) -> StopFlag:
        self._process, self._installed = os.getpid(), True
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        try:
            self._previous_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            self._woken.close()
            self._wake.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="gpp-stop-flag", daemon=True)
        self._listener.start()
        for each in self.signals:  # after the listener is there, which would not hear of an earlier one
            self._previous[each] = signal.signal(each, self._receive)
        forget_in_workers(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        answered = self._answered.is_set()
        self._answered.set()
        self._installed = False
        signal.set_wakeup_fd(self._previous_wakeup)
        for each, handler in self._previous.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        self._wake.close()
        self._listener.join(1.0)  # leaves no thread behind, unless it is busy with a signal
        if self.received and not answered and error is None:
            signal.raise_signal(self.received)

    def agreed(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None
    ) -> signal.Signals | None:
        """The signal that any rank of `group` has received. Collective; `device` must suit the backend."""
        number = torch.tensor(self.received or 0, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return self.answer(int(number))

    def answer(self, number: int) -> signal.Signals | None:
        """Like `agreed`, for callers that reduce `received or 0` (MAX) together with other numbers."""
        if number == 0:
            return None
        self._answered.set()
        return signal.Signals(number)

    def handler_before(self, number: signal.Signals) -> Callable[[int, FrameType | None], Any] | None:
        """The handler in Python that a signal had before; None if it had none."""
        handler = self._previous.get(number)
        return handler if callable(handler) else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self._installed:
            self.received = self.received or signal.Signals(number)
            return
        # in a worker, or restored after the end by code that had saved it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _listen(self) -> None:
        """Read signals, which arrive as bytes even while the main thread waits."""
        with self._woken:
            while byte := self._woken.recv(1):
                self._heard(byte[0])
                if byte[0] not in self.signals:
                    self._pass_on(byte)
                elif not self._expecting:
                    self._expecting = True
                    threading.Thread(target=self._expect_answer, args=(signal.Signals(byte[0]),), daemon=True).start()

    def _expect_answer(self, number: signal.Signals) -> None:
        if not self._answered.wait(self._patience):
            self._overdue(number)

    def _pass_on(self, number: bytes) -> None:
        if self._previous_wakeup != -1:
            with contextlib.suppress(OSError):
                os.write(self._previous_wakeup, number)

    def forget(self) -> None:
        """Close the socket in a forked worker, whose copy of it would report the worker's signals to this rank."""
        with contextlib.suppress(ValueError):
            if self._installed:
                signal.set_wakeup_fd(-1)
        self._wake.close()
        self._woken.close()
