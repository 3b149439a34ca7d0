"""Hang reports: if a rank does not move for long, all ranks print where they are and for whom they wait.

A rank that hangs makes all others wait, each for its neighbour, and the timeout of the process group names one of those
that waited. So shortly before it the ranks are asked, and rank 0 says which of them waits for nobody. A report ends
nothing: what only takes long goes on, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpp.failure.processes import say
from lightning_gpp.failure.stacks import main_thread

_ANSWERS: Final = 2.0
"""Seconds for which rank 0 waits for the answers of the others."""
RELIEF: Final = 4.0
"""Seconds after which a rank that does something else goes on: an error that ends it has been reported by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The reason why a main thread does not go on: `what` completes "it waits for", `ranks` have to do something.

    `brief` is a short form for tables.
    """

    what: str
    ranks: tuple[int, ...]
    brief: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of a rank, for its watch. Both functions are called from another thread, and must be cheap.

    `describe` says in words what it does, and says something else as soon as it goes on. `wait` is what it waits for.
    """

    describe: Callable[[], str] = str
    wait: Callable[[], Wait | None] = lambda: None


class HangReports:
    """Notices that this rank does not move, tells where it is, and on rank 0 collects where all are.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limit: seconds in one activity after which a report is due; `inf` for never.
        wait: what the rank waits for.

    Attributes:
        concluded: on rank 0, who holds up the others; empty if nobody does.
    """

    def __init__(self, rank: int, world_size: int, limit: float, wait: Callable[[], Wait | None]) -> None:
        self._rank, self._world_size, self._limit, self._wait = rank, world_size, limit, wait
        self._action: str | None = None
        self._since = 0.0
        self._asked = self._told = False
        self._relief: tuple[float, float] | None = None
        self.concluded = ""
        self._answers: dict[int, tuple[int, ...]] = {}
        self._conclude_at = float("inf")

    def is_due(self, action: str, now: float) -> bool:
        """True if the rank has been in this activity for too long; once for each."""
        self._relieve_if_due(now)
        if action != self._action:
            if self._told and now - self._since > self._limit:
                self._relief = now + RELIEF, now - self._since
            self._action, self._since = action, now
            self._asked = self._told = False
        due = not self._asked and now - self._since > self._limit
        self._asked = self._asked or due
        return due

    def _relieve_if_due(self, now: float) -> None:
        if self._relief is not None and now >= self._relief[0]:
            say(f"[rank {self._rank}] It goes on, after {self._relief[1]:.0f} s: that was no hang.")
            self._relief, self.concluded = None, ""

    def forgive(self, seconds: float) -> None:
        """Leave out a pause of the watching thread."""
        self._since += seconds

    def tell(self, now: float) -> dict[str, Any]:
        """Print where this rank is; returns the answer for rank 0."""
        self._asked = self._told = True
        wait = self._wait()
        waits = f"It waits for {wait.what}" if wait is not None else "It waits for no rank"
        say(
            f"[rank {self._rank}] Hang report: {self._action}, for {now - self._since:.1f} s. {waits}. "
            f"Its main thread is at {main_thread()}."
        )
        return {"rank": self._rank, "ranks": [] if wait is None else list(wait.ranks)}

    # -- on rank 0

    def begin(self, now: float) -> bool:
        """Begin to collect answers; False if that goes on already."""
        if self._conclude_at < float("inf"):
            return False
        self._answers, self._conclude_at = {}, now + _ANSWERS
        return True

    def hear(self, answer: dict[str, Any]) -> None:
        """Take the answer of a rank."""
        self._answers[int(answer["rank"])] = tuple(answer["ranks"])

    def conclude_if_due(self, now: float) -> None:
        """Say who holds up the others, as soon as all have answered or the time for it is over."""
        if self._conclude_at == float("inf") or (len(self._answers) < self._world_size and now < self._conclude_at):
            return
        self._conclude_at = float("inf")
        self.concluded = conclusion(self._answers, self._world_size)
        say(f"[rank 0] {self.concluded}")


def conclusion(answers: dict[int, tuple[int, ...]], world_size: int) -> str:
    """A sentence about who holds up the others, from the ranks for which each waits."""
    silent = [rank for rank in range(world_size) if rank not in answers]
    free = [rank for rank, ranks in sorted(answers.items()) if not ranks]
    if silent:
        return f"No answer from {named(silent)}: look at these processes first."
    if not free:
        pairs = ", ".join(f"{rank} for {named(ranks)}" for rank, ranks in sorted(answers.items()))
        return f"All ranks wait for others: {pairs}."
    if len(free) == world_size:
        return "No rank waits for another one: all of them are busy, or hang in their own code."
    return f"Look at {named(free)} first: all others wait, and {'these do' if len(free) > 1 else 'it does'} not."


def named(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
