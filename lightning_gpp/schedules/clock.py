"""The clock on which devices are played: it knows who is free, and what is there. What they do is a schedule's choice.

Only what can run is started, so what devices did is a list that cannot wait in a circle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from lightning_gpp.schedules.actions import Action
from lightning_gpp.schedules.tasks import Numbered


@dataclass(slots=True)
class Clock:
    """Devices at work.

    Args:
        num_devices: all free at first.
        tasks: what there is to do; the clock knows them by their numbers.
    """

    num_devices: int
    tasks: Numbered
    time: float = 0
    free: list[float] = field(init=False)
    """When every device is done with what it has started."""
    arrival: list[float] = field(init=False)
    """When all is there that a task waits for; infinite where that is not known."""
    missing: list[int] = field(init=False)
    """For every task how many of those that it waits for were not started yet."""
    _started: list[list[int]] = field(init=False)
    _arrived: list[float] = field(init=False)
    _events: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        devices = range(self.num_devices)
        self._started, self.free = [[] for _ in devices], [0 for _ in devices]
        self.missing = list(self.tasks.missing)
        self.arrival = [inf if count else 0 for count in self.missing]
        self._arrived = [0 for _ in self.missing]
        self._events = [(0, device) for device in devices]

    @property
    def rows(self) -> list[list[Action]]:
        """What every device has started."""
        return [[self.tasks.actions[task] for task in row] for row in self._started]

    def begun(self, device: int) -> bool:
        """Whether a device has started anything."""
        return bool(self._started[device])

    def turns(self) -> Iterator[int]:
        """Go through time: free devices for which something has changed. Ends when nothing goes on any more."""
        events = self._events
        while events:
            now = self.time = events[0][0]
            touched = {heapq.heappop(events)[1]}
            while events and events[0][0] == now:
                touched.add(heapq.heappop(events)[1])
            for device in sorted(touched):
                if self.free[device] <= now:
                    yield device

    def is_ready(self, task: int) -> bool:
        """Whether all is there that a task waits for."""
        return self.arrival[task] <= self.time

    def start(self, task: int) -> None:
        """Let a free device do something now."""
        tasks, missing, latest = self.tasks, self.missing, self._arrived
        device = tasks.devices[task]
        stop = self.free[device] = self.time + tasks.seconds[task]
        self._started[device].append(task)
        heapq.heappush(self._events, (stop, device))
        for reader, travel in tasks.readers[task]:
            arrived = stop + travel
            if arrived > latest[reader]:
                latest[reader] = arrived
            missing[reader] -= 1
            if not missing[reader]:
                self._arrives(reader, stop, device)

    def _arrives(self, task: int, stop: float, device: int) -> None:
        """The last of what a task waits for is on its way; a device that is busy until then comes by itself."""
        arrived, reader = self._arrived[task], self.tasks.devices[task]
        self.arrival[task] = arrived
        if arrived > stop or reader != device:
            heapq.heappush(self._events, (arrived, reader))
