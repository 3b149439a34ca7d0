"""Reads mini-batches before their turn, for stages that are ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any


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
