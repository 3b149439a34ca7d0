"""Ports that several messages share: one at a time, each as early as there is room for it.

Programs are not played in the order of time, so a message may find room in front of one that was booked before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Bookings:
    """The busy times of a port: disjoint intervals in order, those that touch joined."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.stops: list[float] = []

    def earliest(self, start: float, seconds: float) -> float:
        """From `start` on, when the port is free for so many seconds."""
        for index in range(bisect_left(self.stops, start), len(self.starts)):
            if start + seconds <= self.starts[index]:
                return start
            start = max(start, self.stops[index])
        return start

    def add(self, start: float, seconds: float) -> None:
        """Take a time that is free."""
        index = bisect_left(self.starts, start)
        before = index > 0 and self.stops[index - 1] == start
        after = index < len(self.starts) and self.starts[index] == start + seconds
        if before and after:
            self.stops[index - 1] = self.stops.pop(index)
            del self.starts[index]
        elif before:
            self.stops[index - 1] = start + seconds
        elif after:
            self.starts[index] = start
        else:
            self.starts.insert(index, start)
            self.stops.insert(index, start + seconds)


def book(ports: Sequence[Bookings], start: float, seconds: float) -> float:
    """Take the first time from `start` on at which all ports are free for so many seconds, and return it."""
    if not ports or not seconds:
        return start
    found = start
    while True:
        start = found
        for port in ports:
            found = port.earliest(found, seconds)
        if found == start:
            break
    for port in ports:
        port.add(start, seconds)
    return start
