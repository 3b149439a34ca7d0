"""Sessions by what they were captured for: a form of a mini-batch, and Python values that the capture has frozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_MOST: Final = 8
"""Sessions of one form that are kept; each takes memory."""
_OFTEN: Final = 4
"""Captures of one form after which a warning says that they cost time."""


class SessionCache(Generic[T]):
    """Makes sessions when they are needed first; of those that differ only in Python values, it keeps the latest.

    Args:
        warn: warns the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sessions: dict[Hashable, dict[Hashable, T]] = {}
        self._counts: dict[Hashable, int] = {}

    def get(self, form: Hashable, values: Hashable, make: Callable[[], T], changing: Callable[[], str]) -> T:
        """The session for a form and Python values.

        Args:
            form: the form of the mini-batch or call.
            values: stands for the Python values.
            make: makes a session.
            changing: names the values that change, for a warning.
        """
        known = self._sessions.setdefault(form, {})
        if values not in known:
            if len(known) == _MOST:
                del known[next(iter(known))]
            known[values] = make()
            self._count(form, changing)
        return known[values]

    def __iter__(self) -> Iterator[T]:
        return iter([session for known in self._sessions.values() for session in known.values()])

    def _count(self, form: Hashable, changing: Callable[[], str]) -> None:
        self._counts[form] = count = self._counts.get(form, 0) + 1
        if count == _OFTEN:
            self._warn(
                f"{changing()} changed {count - 1} times, and each time the step was captured anew, because modules "
                "that are cut into stages run with the values of their capture. That takes time: pass values that "
                "change often as tensors, or keep the module that reads them in one stage (strategy.stages)."
            )
