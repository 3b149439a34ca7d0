"""The times of a watch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

_START: Final = 300.0
"""Seconds for all ranks to start: imports from a busy file server take minutes."""
_HEARTBEATS: Final = 5
"""The time limit for the end of all ranks, divided by this, is the silence after which a rank counts as stopped."""
_HANG: Final = 0.9
"""Part of the time limit of collectives after which a rank that does not move is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times of a watch, in seconds.

    Attributes:
        silence: without a heartbeat, after which a rank counts as stopped. It must exceed the longest time for which no
            thread of a rank runs (a C call that holds the interpreter's lock). 0: silence is not a failure (for
            debuggers), but exceptions and ends of processes are.
        exit_grace: for a failed rank to print its traceback and end by itself.
        patience: for all ranks to connect at the start.
        hang: in one activity, after which all ranks report where they are.
    """

    silence: float = 12.0
    exit_grace: float = 5.0
    patience: float = 60.0
    hang: float = float("inf")

    @classmethod
    def within(cls, limit: timedelta, collectives: timedelta) -> Limits:
        """Let all ranks end within about `limit` after one of them failed.

        `collectives`: the time after which collectives give up; hangs are reported shortly before.
        """
        seconds = limit.total_seconds()
        return cls(
            silence=seconds / _HEARTBEATS,
            exit_grace=min(5.0, seconds / _HEARTBEATS),
            patience=max(_START, seconds),
            hang=_HANG * collectives.total_seconds(),
        )
