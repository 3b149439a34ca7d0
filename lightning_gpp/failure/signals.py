"""Signals that ask a job to end set a flag, which all ranks read together between two steps; Ctrl-C counts once.

A signal handler that saves or communicates at an arbitrary point would wait for ranks that wait in a receive, for ever.
One process may be signalled alone, or all at slightly different times. So a handler only sets a flag, and what follows
(a checkpoint, an exit code) happens at a point that all ranks pass, and may be collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ECHO: Final = 2.0
"""Seconds after a SIGINT in which others are taken for its echo."""


class StopFlag:
    """A context manager in which `signals` only set a flag. Main thread only; ValueError elsewhere.

    A main thread that waits in a receive runs no Python handlers. So a thread learns of signals, too: it passes each to
    `heard` at once, also those that keep their handlers. One that comes too late to be answered takes effect at the end
    of the context. Forked workers keep the default behaviour of `signals`.

    Ctrl-C counts once: torchrun passes to its processes what the terminal has sent them, too, and a second
    KeyboardInterrupt would end the report of the first, and with it the process.
    """

    def __init__(
        self,
        heard: Callable[[int], object] = lambda number: None,
        *,
        signals: Iterable[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        """The signal that this rank has received, the first of several."""
        self._heard, self._answered = heard, False
        self._previous: dict[signal.Signals, Any] = {}
        self._before_interrupt: Any = None
        self._interrupted = float("-inf")

    def __enter__(self) -> StopFlag:
        self._process = os.getpid()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        try:
            self._previous_wakeup = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            os.close(self._woken)
            os.close(self._wake)
            raise
        self._listener = threading.Thread(target=self._listen, name="gpp-signals", daemon=True)
        self._listener.start()
        self._previous = {each: signal.getsignal(each) for each in self.signals}  # known to the handler at once
        for each in self.signals:  # after the listener is there, which would not hear of an earlier one
            signal.signal(each, self._receive)
        self._before_interrupt = signal.getsignal(signal.SIGINT)
        if callable(self._before_interrupt):
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for each, handler in self._previous.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if signal.getsignal(signal.SIGINT) == self._interrupt:  # and no handler of somebody else
            signal.signal(signal.SIGINT, self._before_interrupt)
        os.write(self._wake, b"\0")
        os.close(self._wake)
        self._listener.join(1.0)  # leaves no thread behind, unless it is busy with a signal
        if self.received and not self._answered and error is None:
            signal.raise_signal(self.received)

    def answer(self) -> None:
        """Say that what was asked for happens now."""
        self._answered = True

    def handler_before(self, number: signal.Signals) -> Callable[[int, FrameType | None], Any] | None:
        """The handler in Python that a signal had before; None if it had none."""
        handler = self._previous.get(number)
        return handler if callable(handler) else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self._previous:
            self.received = self.received or signal.Signals(number)
            return
        # in a worker, or restored after the end by code that had saved it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._interrupted >= _ECHO:
            self._interrupted = now
            self._before_interrupt(number, frame)

    def _listen(self) -> None:
        """Read signals, which arrive as bytes even while the main thread waits, until a zero."""
        while number := os.read(self._woken, 1)[0]:
            self._heard(number)
        os.close(self._woken)


def _forget_wakeups() -> None:
    """In a forked worker: the bytes of its signals would reach the process that it comes from."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeups)
