"""Calls that only some ranks make: a rank waits in a user's collective for ranks that wait for it, or have finished.

Such a job waits until a time limit, and the error then names any rank. A look at the main threads tells it at once: a
rank is in a collective that a line of the user's code began, every other one waits, too, and none of them moves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from lightning_gpp._compat.lightning_module import RUN
from lightning_gpp.failure.hangs import Wait, named
from lightning_gpp.failure.stacks import is_of_user, outwards

STUCK: Final = 10.0
"""Seconds without a move after which ranks that wait for each other are stuck: numbers between them arrive at once."""
_TORCH: Final = str(Path(torch.__file__).parent)
_COLLECTIVES: Final = tuple(
    str(Path(_TORCH, "distributed", file)) for file in ("distributed_c10d.py", "_functional_collectives.py")
)
"""The files of torch's collectives; other parts of torch.distributed also read and write files."""
_PAIRWISE: Final = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv")


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


class Standing:
    """Watches the main thread of this rank, from another thread."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def look(self, wait: Callable[[], Wait | None], now: float) -> Standstill | None:
        """The place where the main thread has waited for `STUCK` seconds without a move; None if it may go on.

        `wait` tells what it waits for, and is asked only of a thread that stands.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or place != self._place:
            self._place, self._since = place, now
        return None if frame is None or now - self._since < STUCK else _standstill(frame, wait())


def _standstill(frame: FrameType, wait: Wait | None) -> Standstill | None:
    """The place of a main thread in a frame; None if it waits for no rank."""
    frames = list(outwards(frame))
    inside = next((n for n, each in enumerate(frames) if not each.f_code.co_filename.startswith(_TORCH)), len(frames))
    calls = [each.f_code.co_name for each in frames[:inside] if each.f_code.co_filename in _COLLECTIVES]
    if not calls and wait is None:
        return None
    ranks = () if wait is None else wait.ranks
    what = "" if wait is None else f"waiting for {wait.what}"
    end = next((n for n, each in enumerate(frames) if each.f_code.co_name == RUN), len(frames))
    user = next((n for n, each in enumerate(frames[:end]) if is_of_user(each.f_code.co_filename)), None)
    if user is None or not calls:
        return Standstill(call=calls[-1] if calls else "", ranks=ranks, what=what)
    called = [each.f_code.co_name for each in reversed(frames[:user]) if each.f_code.co_name != "wrapper"]
    line = f"{frames[user].f_code.co_filename}:{frames[user].f_lineno}"
    return Standstill(call=called[0] if called else calls[-1], line=line, ranks=ranks, what=what)


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
