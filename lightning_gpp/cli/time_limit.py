"""A time limit for work in the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_gpp.errors import ConfigError

AGAIN = 0.1
"""Seconds until TimeIsUp is raised again: Python drops exceptions that are raised during garbage collection."""


class TimeIsUp(BaseException):
    """Raised at any point of the running code; `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float, *, key: str) -> Iterator[None]:
    """Raise TimeIsUp in the block after `seconds`, which the setting `key` gives.

    Raises:
        ConfigError: the limit is not above 0.
    """
    if not seconds > 0:
        raise ConfigError(f"{key}={seconds:g} must be more than 0.")
    before = signal.signal(signal.SIGALRM, _raise_time_is_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp
