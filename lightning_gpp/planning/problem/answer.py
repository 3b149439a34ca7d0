"""The control that a partitioner gets with its problem, and the answer that it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from lightning_gpp.planning.problem.draft import Draft

Progress = Callable[[float, float, float], None]
"""Called now and then with the done part of the search (0..1), the best step so far and its lower bound, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A draft that was not chosen: the seconds of its step, and why it lost, in words."""

    draft: Draft
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of a search.

    Args:
        draft: the best one; None if nothing fits, with the reason in `notes`.
        objective: the value that the search minimised.
        objective_name: what that is, with its unit.
        states: partial or whole solutions visited.
        alternatives: drafts that lost, best first.
        notes: what a user should know, one sentence each.
        interrupted: the user ended the search; no other one is begun.
    """

    draft: Draft | None
    objective: float = inf
    objective_name: str
    states: int
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(slots=True, kw_only=True)
class SearchControl:
    """Limits of a search, and the way to tell how far it is.

    Args:
        seconds: after which an anytime search stops.
        progress: what to call, if anything.
    """

    seconds: float = 10.0
    progress: Progress | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    @property
    def expired(self) -> bool:
        return self.elapsed >= self.seconds

    def report(self, done: float, best: float, lower_bound: float = 0.0) -> None:
        if self.progress is not None:
            self.progress(done, best, lower_bound)
