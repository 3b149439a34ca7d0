"""Ctrl-C counts once: torchrun passes to its processes what the terminal has sent them, too."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Final

_ECHO: Final = 2.0
"""Seconds after a SIGINT in which others are taken for its echo."""


class OneInterrupt:
    """A handler of SIGINT that passes the first on to the handler before it, and none of the next seconds.

    A second KeyboardInterrupt would end the report of the first, and with it the process. Main thread only.
    """

    def __init__(self) -> None:
        self._first = float("-inf")
        self._before: Any = signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now, last = time.monotonic(), self._first
        if now - last < _ECHO:
            return
        self._first = now
        if callable(self._before):
            self._before(number, frame)

    def remove(self) -> None:
        """Restore the handler before, unless somebody else has put another in the place of this one."""
        if signal.getsignal(signal.SIGINT) == self._receive:
            signal.signal(signal.SIGINT, self._before)
