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

    Attributes:
        current: the prepared mini-batch whose turn it is.
        upcoming: the prepared mini-batches after it, as far as they were read.
        interrupted: whether a loader was left before its end, with mini-batches upcoming; whoever reads it, resets it.
    """

    def __init__(
        self,
        ahead: Callable[[], int],
        prepare: Callable[[Any], Any] = lambda batch: batch,
        left: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._ahead, self._prepare, self._left = ahead, prepare, left
        self.current: Any = None
        self.upcoming: deque[Any] = deque()
        self.interrupted = False

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The mini-batches of the loader, each as the loader gave it. `turn` says whose turn it is."""
        self.interrupted = self.interrupted or bool(self.upcoming)
        self.upcoming.clear()
        rest, given = iter(loader), deque[Any]()
        while True:
            self._read(rest, given)
            if not given:
                return
            yield given.popleft()

    def turn(self) -> Any:
        """Go on to the next mini-batch."""
        self.current = self.upcoming.popleft()
        return self.current

    def _read(self, rest: Iterator[Any], given: deque[Any]) -> None:
        wanted, left = 1 + self._ahead(), self._left()
        wanted = wanted if left is None else max(1, min(wanted, left))
        while len(given) < wanted:
            try:
                raw = next(rest)
            except StopIteration:
                return
            given.append(raw)
            self.upcoming.append(self._prepare(raw))
