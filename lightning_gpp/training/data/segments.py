"""Segments: mini-batches between two flushes of a pipeline, and the feed that reads them ahead.

Consecutive mini-batches of one form are a segment. At its first one the pipeline fills, at its last one it drains; in
between every rank works on several mini-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gpp.errors import ScheduleError
from lightning_gpp.schedules import Program


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a mini-batch that all ranks know: its samples, and a fingerprint of its form."""

    batch_size: int
    form: int


class Segments:
    """Divides the mini-batches of a run, or of a pass over data, into segments, equally on all ranks.

    Args:
        first: number of the first mini-batch.

    Attributes:
        current: the segment of the latest mini-batch, as far as it is known.
    """

    def __init__(self, first: int) -> None:
        self.current = range(first, first)

    def begins_at(self, number: int) -> bool:
        """True if a mini-batch is the first one of a segment."""
        return number >= self.current.stop

    def enter(self, number: int, facts: Sequence[Facts], most: int | None = None) -> range:
        """The segment of a mini-batch, as far as it is known.

        Args:
            number: number of the mini-batch.
            facts: facts about this mini-batch and those that follow.
            most: mini-batches until the next flush, this one included; None lets their forms decide.
        """
        alike = next((i for i, other in enumerate(facts) if other != facts[0]), len(facts))
        first = number if self.begins_at(number) else self.current.start
        self.current = range(first, number + (alike if most is None else min(alike, most)))
        return self.current

    def on_their_way(self, number: int, lead: int) -> range:
        """The mini-batches that any device has started, if `number` is the next one."""
        return range(number, min(number + lead, max(number, self.current.stop)))


def flushed_if_need_be(same_size: bool, continuous: Callable[[], Program], flushed: Callable[[], Program]) -> Program:
    """A program that does not flush; for mini-batches of an unusual size, if there is none, one that flushes.

    Raises:
        ScheduleError: mini-batches of the usual size need a flush.
    """
    try:
        return continuous()
    except ScheduleError:
        if same_size:
            raise
        return flushed()


def later(arguments: Sequence[Any], number: int) -> list[Any]:
    """The arguments of the user's step, except the mini-batch, for the one that comes `number` mini-batches later."""
    rest = list(arguments)
    if number and rest and isinstance(rest[0], int):
        rest[0] += number  # batch_idx
    return rest


class Feed:
    """Reads the mini-batches of a loader ahead, and delivers each at its turn.

    Args:
        ahead: returns the number of mini-batches to read before their turn; called for each.
        prepare: prepares an item of the loader for the user's step, for example moves it to a device.
        left: returns the number of mini-batches that will still be used, this one included; None if unknown.
        group: the group of an item of the loader; mini-batches of another group do not count as upcoming.

    Attributes:
        ahead: see above.
        upcoming: the prepared mini-batches after the current one that were read.
        interrupted: whether a loader was left before its end, with mini-batches upcoming; its reader resets it.
    """

    def __init__(
        self,
        ahead: Callable[[], int] = lambda: 0,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        left: Callable[[], int | None] = lambda: None,
        group: Callable[[Any], Any] = lambda batch: None,
    ) -> None:
        self.ahead, self._prepare, self._left, self._group = ahead, prepare, left, group
        self._waiting: deque[tuple[Any, Any]] = deque()
        self.upcoming: list[Any] = []
        self.interrupted = False

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the unprepared items of the loader; `turn` advances to the prepared ones."""
        self.interrupted = self.interrupted or bool(self._waiting)
        self._waiting.clear()
        rest, given = iter(loader), deque[Any]()
        while True:
            self._read(rest, given)
            if not given:
                return
            yield given.popleft()

    def turn(self) -> tuple[Any, Any]:
        """Advance to the next mini-batch, and return the loader's item and the prepared one."""
        raw, prepared = self._waiting.popleft()
        mine = self._group(raw)
        self.upcoming = [batch for other, batch in self._waiting if self._group(other) == mine]
        return raw, prepared

    def _read(self, rest: Iterator[Any], given: deque[Any]) -> None:
        wanted, left = 1 + self.ahead(), self._left()
        wanted = wanted if left is None else max(1, min(wanted, left))
        while len(given) < wanted:
            try:
                raw = next(rest)
            except StopIteration:
                return
            given.append(raw)
            self._waiting.append((raw, self._prepare(raw)))
