"""The clock on which devices are played: it knows who is free, and what is there. What they do is a schedule's choice.

Only what can run is started, so what devices did is a list that cannot wait in a circle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from lightning_gpp.schedules.actions import Action
from lightning_gpp.schedules.work import Readers, Task, Work


@dataclass(slots=True)
class Clock:
    """Devices at work.

    Args:
        num_devices: all free at first.
        seconds: of every task.
        readers: who waits for a task, and the seconds until its message is there.
        missing: for every task how many of those that it waits for were not started yet.
    """

    num_devices: int
    seconds: Mapping[Task, float]
    readers: Readers
    missing: dict[Task, int]
    time: float = 0
    rows: list[list[Action]] = field(init=False)
    """What every device has started."""
    free: list[float] = field(init=False)
    """When every device is done with that."""
    _arrived: dict[Task, float] = field(init=False)
    _events: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        devices = range(self.num_devices)
        self.rows, self.free = [[] for _ in devices], [0 for _ in devices]
        self._arrived = dict.fromkeys(self.missing, 0)
        self._events = [(0, device) for device in devices]

    @classmethod
    def of(cls, work: Work) -> Clock:
        """A clock on which a plan's work has not begun."""
        return cls(work.plan.num_devices, work.seconds, work.readers, dict(work.missing))

    def turns(self) -> Iterator[int]:
        """Go through time: free devices for which something has changed. Ends when nothing goes on any more."""
        while self._events:
            self.time = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] == self.time:
                touched.add(heapq.heappop(self._events)[1])
            for device in sorted(touched):
                if self.free[device] <= self.time:
                    yield device

    def arrival(self, task: Task) -> float:
        """When all is there that a task waits for; infinite where that is not known."""
        return inf if self.missing[task] else self._arrived[task]

    def is_ready(self, task: Task) -> bool:
        """Whether all is there that a task waits for."""
        return self.arrival(task) <= self.time

    def start(self, task: Task) -> None:
        """Let a free device do something now."""
        device, action = task
        stop = self.free[device] = self.time + self.seconds[task]
        self.rows[device].append(action)
        heapq.heappush(self._events, (stop, device))
        for reader, travel in self.readers[task]:
            arrived = self._arrived[reader] = max(self._arrived[reader], stop + travel)
            missing = self.missing[reader] = self.missing[reader] - 1
            if not missing and (arrived > stop or reader[0] != device):
                heapq.heappush(self._events, (arrived, reader[0]))
