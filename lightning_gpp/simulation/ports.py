"""Ports that several transfers share, one at a time, each at the first free interval.

The simulator does not visit transfers in the order of time, so one may take an interval before those booked earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Bookings:
    """The busy times of a port: disjoint intervals in order; adjacent ones are joined."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.stops: list[float] = []

    def earliest(self, start: float, seconds: float) -> float:
        """The first time, from `start` on, at which the port is free for `seconds`."""
        for index in range(bisect_left(self.stops, start), len(self.starts)):
            if start + seconds <= self.starts[index]:
                return start
            start = max(start, self.stops[index])
        return start

    def add(self, start: float, seconds: float) -> None:
        """Book a free interval."""
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
    """Book the first time, from `start` on, at which all ports are free for `seconds`, and return it."""
    if not ports or not seconds:
        return start
    later = start
    while True:
        start = later
        for port in ports:
            later = port.earliest(later, seconds)
        if later == start:
            break
    for port in ports:
        port.add(start, seconds)
    return start
