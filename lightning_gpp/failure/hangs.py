"""Ranks that do not move: reports of where they are.

A rank that hangs makes all others wait, each for its neighbour, and the timeout of the process group names one of those
that waited. So shortly before it all ranks print where they are, and rank 0 says which of them waits for nobody. Where
each waits for others, and none moves, they do so at once. If one of them is in a collective that its user's code calls,
and others are not, the job ends. Otherwise a report ends nothing: what only takes long goes on, and says so.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from lightning_gpp.explained import named_at_end
from lightning_gpp.failure.processes import say
from lightning_gpp.user_code import is_user_code

RELIEF: Final = 4.0
"""Seconds after which a rank that does something else goes on: an error that ends it has been reported by then."""
STUCK = 30.0
"""Seconds without a move after which ranks that wait for each other are stuck: large jobs take a while to connect."""
_COLLECTIVES: Final = tuple(
    str(Path(torch.__file__).parent / "distributed" / file)
    for file in ("distributed_c10d.py", "_functional_collectives.py")
)
"""The files of torch's collectives; other parts of torch.distributed also read and write files."""
_TRAINER: Final = str(Path("lightning", "pytorch", "trainer", "trainer.py"))
_RUNS: Final = ("fit", "validate", "test", "predict")
"""The trainer's methods in which all ranks are together: what called one is no call of one rank."""
_STANDARD: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = sysconfig.get_path("purelib")
"""Inside the standard library's folder, but users' code may be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The reason why a main thread does not go on: `what` completes "it waits for", `ranks` have to do something."""

    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of a rank, for its watch. The functions are called from another thread, and must be cheap.

    `describe` says in words what it does, and says something else as soon as it goes on. `wait` is what it waits for.
    `ends`: whether it is in the call of the user's code that ends the run on all ranks.
    """

    describe: Callable[[], str] = str
    wait: Callable[[], Wait | None] = lambda: None
    ends: Callable[[], bool] = lambda: False


class Progress:
    """Watches, from another thread, how long the main thread of this rank has been in one activity and at one place.

    Args:
        rank: this rank.
        world_size: number of ranks.
        activity: of this rank.
        limit: seconds in one activity after which a report is due; `inf` for never.

    Attributes:
        action: what the rank does, in words.
        wait: what it waits for; None if it waits for no rank.
        calls: whether code of the user, inside a trainer's run, is in a collective that does not end.
    """

    def __init__(self, rank: int, world_size: int, activity: Activity, limit: float) -> None:
        self._rank, self._activity, self._limit = rank, activity, limit
        self.action = ""
        self.wait: Wait | None = None
        self.calls = False
        self._together = Wait(what="all ranks to make this call", ranks=tuple({*range(world_size)} - {rank}))
        self._since = self._standing_since = 0.0
        self._place: tuple[int, int] | None = None
        self._told = False
        self._relief: tuple[float, float] | None = None

    def describe(self) -> str:
        """The present activity, in words."""
        return self._activity.describe()

    def look(self, now: float) -> bool:
        """Take in what the rank does now. Returns True if that proves that a reported hang was none."""
        try:
            action, self.wait = self._activity.describe(), self._activity.wait()
        except Exception as error:  # the watch must continue whatever the caller's description raises
            action, self.wait = f"unknown ({error!r})", None
        if action != self.action:
            if self._told and now - self._since > min(self._limit, STUCK):
                self._relief = now + RELIEF, now - self._since
            self.action, self._since, self._told = action, now, False
        self._look_at_place(now)
        return self._is_relieved(now)

    def _look_at_place(self, now: float) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = None if frame is None else (id(frame), frame.f_lasti)
        if place is None or place != self._place:
            self._place, self._standing_since, self.calls = place, now, False
        elif now - self._standing_since > STUCK and any(f.f_code.co_filename in _COLLECTIVES for f in _outwards(frame)):
            self.wait, self.calls = self.wait or self._together, self._activity.ends() or _is_users_call(frame)

    def _is_relieved(self, now: float) -> bool:
        if self._relief is None or now < self._relief[0]:
            return False
        say(f"[rank {self._rank}] It goes on, after {self._relief[1]:.0f} s: that was no hang.")
        self._relief = None
        return True

    def forgive(self, seconds: float) -> None:
        """Leave out a pause of the watching thread."""
        self._since += seconds

    def is_overdue(self, now: float) -> bool:
        """True if the rank has been in this activity for too long, and has not reported it yet."""
        return not self._told and now - self._since > self._limit

    def is_stuck(self, now: float) -> bool:
        """True if the main thread waits for others and does not move."""
        return self.wait is not None and now - self._standing_since > STUCK

    def report(self, now: float) -> None:
        """Print where this rank is."""
        self._told = True
        waits = "no rank" if self.wait is None else self.wait.what
        text = (
            f"[rank {self._rank}] Hang report: {self.action}, for {now - self._since:.1f} s. It waits for {waits}. "
            f"Its main thread is at {_main_thread()}."
        )
        say(named_at_end(text))


def conclusion(waits: Mapping[int, tuple[int, ...]]) -> str:
    """A sentence about who holds up the others, from the ranks for which each waits."""
    free = [rank for rank, ranks in sorted(waits.items()) if not ranks]
    if not free:
        pairs = ", ".join(f"{rank} for {named(ranks)}" for rank, ranks in sorted(waits.items()))
        return f"All ranks wait for others: {pairs}."
    if len(free) == len(waits):
        return "No rank waits for another one: all of them are busy, or hang in their own code."
    return f"Look at {named(free)} first: all others wait, and {'these do' if len(free) > 1 else 'it does'} not."


def named(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# --- the main thread, seen from another one


def _main_thread() -> str:
    """The innermost line of the main thread, and its innermost line in user code, if that is another one."""
    frames = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))
    chosen = [*frames[:1], *[each for each in frames if _is_of_user(each.f_code.co_filename)][:1]]
    lines = [f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in chosen]
    return ", called from ".join(dict.fromkeys(lines))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users_call(frame: FrameType | None) -> bool:
    """True if code of the user, inside a trainer's run, has called what a main thread is in."""
    users = False
    for each in _outwards(frame):
        if each.f_code.co_name in _RUNS and each.f_code.co_filename.endswith(_TRAINER):
            return users
        users = users or _is_of_user(each.f_code.co_filename)
    return False


def _is_of_user(path: str) -> bool:
    """True for a file of the user's code, or of a package that it uses."""
    return is_user_code(path) and (path.startswith(_INSTALLED) or not path.startswith(_STANDARD))
