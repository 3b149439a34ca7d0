"""A feed reads mini-batches before their turn, for stages that are ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Feed:
    """Reads the mini-batches of a loader ahead, and tells whose turn it is.

    Args:
        ahead: how many mini-batches to read before their turn; asked again for each.
        prepare: makes of what the loader gives what the user's step takes, for example on another device.
        left: how many mini-batches will be asked for from now on, this one included; None if nobody knows.
        group: of what the loader gives; mini-batches of another group do not count as upcoming.

    Attributes:
        ahead: see above.
        upcoming: the prepared mini-batches after the one whose turn it is, as far as they were read.
        interrupted: whether a loader was left before its end, with mini-batches upcoming; whoever reads it, resets it.
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
        """The mini-batches of the loader, each as the loader gave it. `turn` says whose turn it is."""
        self.interrupted = self.interrupted or bool(self._waiting)
        self._waiting.clear()
        rest, given = iter(loader), deque[Any]()
        while True:
            self._read(rest, given)
            if not given:
                return
            yield given.popleft()

    def turn(self) -> tuple[Any, Any]:
        """Go on to the next mini-batch: as the loader gave it, and prepared."""
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
