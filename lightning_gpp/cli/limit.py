"""A time limit for searches that have none of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_gpp.errors import ConfigError


class TimeIsUp(BaseException):
    """Raised in the middle of whatever runs; no `except Exception` on the way takes it for an error."""


AGAIN = 0.1
"""Seconds until it is raised once more: Python drops what is raised while it collects garbage."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after so many seconds. For the main thread of a process.

    Raises:
        ConfigError: it is no time.
    """
    if not seconds > 0:
        raise ConfigError(f"compare_seconds={seconds:g} must be more than 0.")
    before = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp
