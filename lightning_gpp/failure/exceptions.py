"""Exceptions that ranks have reported, and what follows: each rank handles its own, or the job ends.

An exception that every rank raises, such as that of a pruned trial, leaves nobody waiting, and the processes live on.
One that only some ranks raise leaves the others in receives for ever. Nobody can see in advance which of the two it is,
so the ranks have a moment to raise their own.
"""

from __future__ import annotations

import hashlib
import traceback
from enum import Enum
from typing import Final

from lightning_gpp.failure.cause import EXIT_CODE, Cause
from lightning_gpp.user_code import is_own_code

PATIENCE: Final = 1.5
"""Seconds for all other ranks to raise exceptions of their own after one has."""


class Verdict(Enum):
    """The consequence of an exception that a rank has reported."""

    ENDS = "the job ends"
    APART = "all ranks have raised exceptions of their own, at different points of the program"
    TOGETHER = "all ranks have raised the same exception at the same point of the program; they can communicate"


class Exceptions:
    """On rank 0: the exceptions that ranks have reported and that nothing has followed from yet.

    Attributes:
        first: the one that was reported first; None if there is none.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.clear()

    def clear(self) -> None:
        """Forget them: ranks handle them."""
        self._raised: dict[int, Cause] = {}
        self.first: Cause | None = None
        self._until = float("inf")

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C, which comes to ranks at different points of the program, and ends the job."""
        return self.first is not None and self.first.code != EXIT_CODE

    def add(self, cause: Cause, now: float) -> None:
        """Take in a report."""
        if self.first is None:
            self.first, self._until = cause, now + PATIENCE
        self._raised[cause.rank] = cause

    def verdict(self, now: float) -> Verdict | None:
        """The consequence; None if there is no exception, or other ranks may still raise theirs."""
        if len(self._raised) == self._world_size:
            if len({cause.point for cause in self._raised.values()}) == 1:
                return Verdict.TOGETHER
            return Verdict.ENDS if self.interrupted else Verdict.APART
        return Verdict.ENDS if now >= self._until else None


def point_of(error: BaseException) -> str:
    """A digest of an exception's type and of the point of the program where it was raised.

    This library's own frames do not count: a hook may be called in other ways on the rank that runs the step.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    others = [frame for frame in frames if not is_own_code(frame[0])]
    return hashlib.sha256(repr((type(error).__qualname__, others)).encode()).hexdigest()[:16]
