"""Sessions by what they were captured for: a form of a mini-batch, and Python values that the capture has frozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, TypeVar

T = TypeVar("T")

_MOST: Final = 8
"""Sessions of one form that are kept; each takes memory."""
_ALL: Final = 256
"""Sessions of all forms that are kept; with dynamic padding every length of sequences is a form."""
_OFTEN: Final = 4
"""Captures of one form after which a warning says that they cost time."""


class SessionCache(dict[tuple[Hashable, Hashable], T]):
    """Sessions by the form of a mini-batch or call, and by what stands for Python values.

    The latest are kept, of all and of those that differ only in Python values.

    Args:
        warn: warns the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn
        self._counts: dict[Hashable, int] = {}

    def make(self, key: tuple[Hashable, Hashable], make: Callable[[], T], changing: Callable[[], str]) -> T:
        """Make the session for a form and Python values. `changing`: names the values that change, for a warning."""
        same = [known for known in self if known[0] == key[0]]
        if len(same) == _MOST or len(self) == _ALL:
            del self[same[0] if len(same) == _MOST else next(iter(self))]
        self[key] = made = make()
        self._count(key[0], changing)
        return made

    def _count(self, form: Hashable, changing: Callable[[], str]) -> None:
        self._counts[form] = count = self._counts.get(form, 0) + 1
        if count == _OFTEN:
            self._warn(
                f"{changing()} changed {count - 1} times, and each time the step was captured anew, because what is "
                "cut into stages runs with the values of its capture. That takes time: pass values that change often "
                "as tensors, keep the module that reads them in one stage (strategy.stages), or let the step run as "
                "a whole (strategy.step=whole)."
            )
