"""The clock of list scheduling: devices that become free, tasks that become ready. Policies decide what starts.

Only tasks that are ready start, so the orders that come out cannot deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from lightning_gpp.schedules.actions import Action
from lightning_gpp.schedules.task_graph import TaskGraph


@dataclass(slots=True)
class Clock:
    """Devices that run a task graph.

    Args:
        num_devices: number of devices, all free at first.
        tasks: what to run; the clock knows tasks by their numbers.
    """

    num_devices: int
    tasks: TaskGraph
    time: float = 0
    free: list[float] = field(init=False)
    """Time at which every device ends what it has started."""
    arrival: list[float] = field(init=False)
    """Time at which all inputs of a task are there; infinite while that is unknown."""
    missing: list[int] = field(init=False)
    """For every task the number of its inputs whose tasks have not started."""
    began: list[float] = field(init=False)
    """Time at which every task started; infinite before."""
    _started: list[list[int]] = field(init=False)
    _arrived: list[float] = field(init=False)
    _events: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        devices = range(self.num_devices)
        self._started, self.free = [[] for _ in devices], [0 for _ in devices]
        self.missing = list(self.tasks.missing)
        self.arrival = [inf if count else 0 for count in self.missing]
        self.began = [inf for _ in self.missing]
        self._arrived = [0 for _ in self.missing]
        self._events = [(0, device) for device in devices]

    @property
    def rows(self) -> list[list[Action]]:
        """For every device the actions that it has started."""
        return [[self.tasks.actions[task] for task in row] for row in self._started]

    def begins(self) -> list[float]:
        """For every device the time of its first start; infinite if it has none."""
        return [self.began[row[0]] if row else inf for row in self._started]

    def has_begun(self, device: int) -> bool:
        """True if a device has started anything."""
        return bool(self._started[device])

    def turns(self) -> Iterator[int]:
        """Advance the time; yield free devices for which something has changed, until no event is left."""
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
        """True if all inputs of a task are there."""
        return self.arrival[task] <= self.time

    def start(self, task: int) -> None:
        """Start a task on its device, which must be free, now."""
        tasks, missing, latest = self.tasks, self.missing, self._arrived
        device = tasks.devices[task]
        self.began[task] = self.time
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
        """Record when the last input of a task arrives. A device that is busy until then looks again by itself."""
        arrived, reader = self._arrived[task], self.tasks.devices[task]
        self.arrival[task] = arrived
        if arrived > stop or reader != device:
            heapq.heappush(self._events, (arrived, reader))
