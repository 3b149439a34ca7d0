"""Ranks that do not move: reports of where they are, and calls that only some ranks make.

A rank that hangs makes all others wait, each for its neighbour, and the timeout of the process group names one of those
that waited. So shortly before it all ranks print where they are, and rank 0 says which of them waits for nobody. A
report ends nothing: what only takes long goes on, and says so.

A rank in a collective that others will never call is told at once: a line of the user's code began it, every other rank
waits, too, and none of them moves.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from lightning_gpp.explained import named_at_end
from lightning_gpp.failure.processes import say
from lightning_gpp.user_code import is_user_code

RELIEF: Final = 4.0
"""Seconds after which a rank that does something else goes on: an error that ends it has been reported by then."""
STUCK: Final = 10.0
"""Seconds without a move after which ranks that wait for each other are stuck: numbers between them arrive at once."""
_TORCH: Final = str(Path(torch.__file__).parent)
_COLLECTIVES: Final = tuple(
    str(Path(_TORCH, "distributed", file)) for file in ("distributed_c10d.py", "_functional_collectives.py")
)
"""The files of torch's collectives; other parts of torch.distributed also read and write files."""
_TRAINER: Final = str(Path("lightning", "pytorch", "trainer", "trainer.py"))
_RUNS: Final = ("fit", "validate", "test", "predict")
"""The trainer's methods in which all ranks are together: what called one is no call of one rank."""
_PAIRWISE: Final = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv")
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
    """The activity of a rank, for its watch. Both functions are called from another thread, and must be cheap.

    `describe` says in words what it does, and says something else as soon as it goes on. `wait` is what it waits for.
    """

    describe: Callable[[], str] = str
    wait: Callable[[], Wait | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A place where a main thread waits for other ranks.

    Attributes:
        call: the function that the user's code called, or the one of torch.
        line: the line of the user's code; empty if only libraries communicate.
        ranks: the ranks that have to do something; empty for all.
        what: the reason, for messages.
    """

    call: str = ""
    line: str = ""
    ranks: tuple[int, ...] = ()
    what: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Standstill:
        """The inverse of `dataclasses.asdict`, after JSON."""
        return cls(**{**message, "ranks": tuple(message["ranks"])})

    def __str__(self) -> str:
        return f"in {self.call} at {self.line}" if self.line else self.what or f"in {self.call}"

    @property
    def is_shared(self) -> bool:
        """True in a collective that the user's code calls."""
        return bool(self.line) and self.call not in _PAIRWISE


class Progress:
    """Watches, from another thread, how long the main thread of this rank has been in one activity and at one place.

    Args:
        rank: this rank.
        activity: of this rank.
        limit: seconds in one activity after which a report is due; `inf` for never.

    Attributes:
        action: what the rank does, in words.
        wait: what it waits for; None if it waits for no rank.
        place: where the main thread has waited for `STUCK` seconds without a move; None if it may go on.
    """

    def __init__(self, rank: int, activity: Activity, limit: float) -> None:
        self._rank, self._activity, self._limit = rank, activity, limit
        self.action = ""
        self.wait: Wait | None = None
        self.place: Standstill | None = None
        self._since = self._standing_since = 0.0
        self._frame: tuple[int, int] | None = None
        self._told = False
        self._relief: tuple[float, float] | None = None

    def look(self, now: float) -> bool:
        """Take in what the rank does now. Returns True if that proves that a reported hang was none."""
        try:
            action, self.wait = self._activity.describe(), self._activity.wait()
        except Exception as error:  # the watch must continue whatever the caller's description raises
            action, self.wait = f"unknown ({error!r})", None
        if action != self.action:
            if self._told and now - self._since > self._limit:
                self._relief = now + RELIEF, now - self._since
            self.action, self._since, self._told = action, now, False
        self.place = self._standstill(now)
        return self._is_relieved(now)

    def _is_relieved(self, now: float) -> bool:
        if self._relief is None or now < self._relief[0]:
            return False
        say(f"[rank {self._rank}] It goes on, after {self._relief[1]:.0f} s: that was no hang.")
        self._relief = None
        return True

    def _standstill(self, now: float) -> Standstill | None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or place != self._frame:
            self._frame, self._standing_since = place, now
        return None if frame is None or now - self._standing_since < STUCK else _standstill(frame, self.wait)

    def forgive(self, seconds: float) -> None:
        """Leave out a pause of the watching thread."""
        self._since += seconds

    def is_overdue(self, now: float) -> bool:
        """True if the rank has been in this activity for too long, and has not reported it yet."""
        return not self._told and now - self._since > self._limit

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


def _is_of_user(path: str) -> bool:
    """True for a file of the user's code, or of a package that it uses."""
    return is_user_code(path) and (path.startswith(_INSTALLED) or not path.startswith(_STANDARD))


def _standstill(frame: FrameType, wait: Wait | None) -> Standstill | None:
    """The place of a main thread in a frame; None if it waits for no rank."""
    frames = list(_outwards(frame))
    inside = next((n for n, each in enumerate(frames) if not each.f_code.co_filename.startswith(_TORCH)), len(frames))
    calls = [each.f_code.co_name for each in frames[:inside] if each.f_code.co_filename in _COLLECTIVES]
    if not calls and wait is None:
        return None
    ranks = () if wait is None else wait.ranks
    what = "" if wait is None else f"waiting for {wait.what}"
    end = next((n for n, each in enumerate(frames) if _is_run(each)), len(frames))
    user = next((n for n, each in enumerate(frames[:end]) if _is_of_user(each.f_code.co_filename)), None)
    if user is None or not calls:
        return Standstill(call=calls[-1] if calls else "", ranks=ranks, what=what)
    called = [each.f_code.co_name for each in reversed(frames[:user]) if each.f_code.co_name != "wrapper"]
    line = f"{frames[user].f_code.co_filename}:{frames[user].f_lineno}"
    return Standstill(call=called[0] if called else calls[-1], line=line, ranks=ranks, what=what)


def _is_run(frame: FrameType) -> bool:
    return frame.f_code.co_name in _RUNS and frame.f_code.co_filename.endswith(_TRAINER)


# --- calls that only some ranks make


def lonely_call(places: Mapping[int, Standstill | None], finished: frozenset[int]) -> tuple[int, str] | None:
    """The first rank in a call that others do not make, and what it does, as a verb phrase; None if there is none.

    Args:
        places: where each rank stands; None for one that may go on by itself.
        finished: the ranks that have come to their end.
    """
    waiting = {rank: place for rank, place in places.items() if rank not in finished and place is not None}
    first = next((rank for rank in sorted(waiting) if waiting[rank].is_shared), None)
    if first is None or len(waiting) + len(finished) < len(places):
        return None
    there = {rank for rank, place in waiting.items() if place.is_shared and place.call == waiting[first].call}
    if there == set(places) or not _all_stuck(waiting, there | finished):
        return None
    missing = [rank for rank in sorted(places) if rank not in there]
    elsewhere = "; ".join(
        f"rank {rank} " + ("has finished" if rank in finished else f"is {waiting[rank]}") for rank in missing
    )
    return first, (
        f"waits {waiting[first]} for {named(missing)}, which {'does' if len(missing) == 1 else 'do'} not make this "
        f"call ({elsewhere}). Let every rank call it: conditions such as `trainer.is_global_zero` belong around what "
        "does not communicate"
    )


def _all_stuck(waiting: Mapping[int, Standstill], stuck: set[int]) -> bool:
    """True if all ranks that wait need one of the `stuck` ranks, or one that does."""
    before = -1
    while len(stuck) > before:
        before = len(stuck)
        stuck = stuck | {rank for rank, place in waiting.items() if _needs(place, stuck)}
    return stuck >= set(waiting)


def _needs(place: Standstill, stuck: set[int]) -> bool:
    """True if a rank cannot go on without the `stuck` ones; between two ranks a large tensor may be on its way."""
    return bool(stuck.intersection(place.ranks)) if place.ranks else place.call not in _PAIRWISE
