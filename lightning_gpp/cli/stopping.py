"""Ways to stop a command during its work: Ctrl-C, a time limit, a closed pipe. All are for the main thread."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_gpp.errors import ConfigError

EXIT_CODE = 130
"""The exit code of a command that Ctrl-C has ended."""

AGAIN = 0.1
"""Seconds until TimeIsUp is raised again: Python drops exceptions that are raised during garbage collection."""


class TimeIsUp(BaseException):
    """Raised at any point of the running code; `except Exception` does not catch it."""


@contextmanager
def interruptible(message: str = "") -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, even if a library drops it or turns it into an error of its own.

    An exception that ends the block after Ctrl-C is turned into KeyboardInterrupt. `message` tells the user what the
    interrupt means for the work in the block.
    """
    outer = signal.getsignal(signal.SIGINT)
    interrupt = outer if isinstance(outer, _Interrupt) else _Interrupt()
    with _handled(signal.SIGINT, interrupt):
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if interrupt.pressed or isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(message or str(error)) from error
            raise


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and dropped, inside `interruptible`."""
    interrupt = signal.getsignal(signal.SIGINT)
    if isinstance(interrupt, _Interrupt) and interrupt.pressed:
        raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C is ignored, for the moment in which results are shown."""
    with _handled(signal.SIGINT, signal.SIG_IGN):
        yield


@contextmanager
def pipeable() -> Iterator[None]:
    """Inside, a command ends without a traceback if the reader of its output, such as `head`, closes the pipe.

    Raises:
        SystemExit: the reader has gone.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if _has_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
        sys.exit(1)


def _has_reader() -> bool:
    """False if nobody reads what is printed; another pipe may have been broken."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def time_limit(seconds: float, *, key: str) -> Iterator[None]:
    """Raise TimeIsUp in the block after `seconds`, which the setting `key` gives.

    Raises:
        ConfigError: the limit is not above 0.
    """
    if not seconds > 0:
        raise ConfigError(f"{key}={seconds:g} must be more than 0.")
    with _handled(signal.SIGALRM, _raise_time_is_up):
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class _Interrupt:
    """Handler of SIGINT that raises KeyboardInterrupt, and remembers it."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt


def _raise_time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


@contextmanager
def _handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
