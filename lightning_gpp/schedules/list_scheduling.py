"""List scheduling: whenever a device is free, a policy chooses one of its ready tasks.

A task graph has the tasks of one mini-batch; the clock knows which devices are free and which tasks are ready. Only
ready tasks start, so the resulting orders cannot deadlock. Every order of this package that is not written by hand
comes from here; the policies are

    Priorities      the ready task of least rank that fits the memory (`device_orders`, `bidirectional`)
    BubbleFilling   input gradients and forwards; weight gradients where the device would idle (`bubble_filling`)
    Compaction      a given order, whose actions may move up into gaps (`building_blocks`)

`in_order` runs a given order without choosing: start times and step time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final, Protocol

from lightning_gpp.schedules.actions import Action, Kind

Task = tuple[int, Action]
"""An action on one device."""

DeviceOrders = Sequence[Sequence[Action]]
"""The actions of every device, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """All tasks, in lists by their numbers.

    Args:
        numbers: number of every task, from 0.
        devices: device of every task.
        actions: action of every task.
        seconds: duration of every task.
        takes: bytes that a task allocates, or frees if negative; samples if the plan has no bytes.
        readers: tasks that wait for a task, and the seconds that its message takes.
        missing: number of tasks that a task waits for.
    """

    numbers: Mapping[Task, int]
    devices: Sequence[int]
    actions: Sequence[Action]
    seconds: Sequence[float]
    takes: Sequence[float]
    readers: Sequence[Sequence[tuple[int, float]]]
    missing: Sequence[int]


@dataclass(slots=True)
class Clock:
    """Devices that run a task graph.

    Args:
        num_devices: number of devices, all free at first.
        tasks: the tasks to run; the clock knows them by their numbers.
    """

    num_devices: int
    tasks: TaskGraph
    time: float = 0
    free: list[float] = field(init=False)
    """Time at which every device ends what it has started."""
    arrival: list[float] = field(init=False)
    """Time at which all inputs of a task are there; infinite while that is unknown."""
    missing: list[int] = field(init=False)
    """Number of every task's inputs whose tasks have not started."""
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
        """The actions that every device has started."""
        return [[self.tasks.actions[task] for task in row] for row in self._started]

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
        """Start a task now; its device must be free."""
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


SLACK: Final = 1 + 1e-9
"""Sums of bytes, or of seconds, that differ by rounding alone count as equal."""


class SchedulingPolicy(Protocol):
    """Chooses the tasks of free devices. A task that it returns starts at once."""

    def choose(self, device: int) -> int | None:
        """The task that a free device starts; None if it waits."""

    def force(self) -> int | None:
        """The task that starts beyond the memory limits when all devices wait for memory; None if there is none."""


def list_schedule(clock: Clock, policy: SchedulingPolicy) -> None:
    """Run tasks until the policy starts no more."""
    going = True
    while going:
        for device in clock.turns():
            task = policy.choose(device)
            if task is not None:
                clock.start(task)
        forced = policy.force()
        going = forced is not None
        if forced is not None:
            clock.start(forced)


@dataclass(slots=True)
class Priorities:
    """The policy that starts, of the heads of a device's lanes, the ready one of least rank.

    Args:
        clock: the clock.
        lanes: queues of tasks of every device, each to run in its order.
        ranks: rank of every task; of equal ones that compete, the one in the earlier lane wins.
        limits: bytes that the tasks of every device may hold; None if memory does not matter.
    """

    clock: Clock
    lanes: Sequence[Sequence[deque[int]]]
    ranks: Sequence[tuple[float, ...]]
    limits: Sequence[float] | None = None
    held: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [0.0 for _ in self.lanes]

    def choose(self, device: int) -> int | None:
        return self._taken(self._first(device, fitting=self.limits is not None))

    def force(self) -> int | None:
        lanes = [lane for lane in map(self._first, range(len(self.lanes))) if lane]
        return self._taken(min(lanes, key=lambda lane: self.ranks[lane[0]], default=None))

    def waiting(self) -> list[int]:
        """The tasks at the head of all lanes."""
        return [lane[0] for lanes in self.lanes for lane in lanes if lane]

    def _first(self, device: int, *, fitting: bool = False) -> deque[int] | None:
        arrival, now, ranks = self.clock.arrival, self.clock.time, self.ranks
        best: deque[int] | None = None
        for lane in self.lanes[device]:
            sooner = lane and arrival[lane[0]] <= now and (best is None or ranks[lane[0]] < ranks[best[0]])
            if sooner and (not fitting or self._fits(device, lane[0])):
                best = lane
        return best

    def _fits(self, device: int, task: int) -> bool:
        """True if there is memory for a task. Only forwards need any."""
        tasks = self.clock.tasks
        if self.limits is None or tasks.actions[task].kind is not Kind.FORWARD:
            return True
        return self.held[device] + tasks.takes[task] <= self.limits[device] * SLACK

    def _taken(self, lane: deque[int] | None) -> int | None:
        if lane is None:
            return None
        task = lane.popleft()
        self.held[self.clock.tasks.devices[task]] += self.clock.tasks.takes[task]
        return task


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOrder:
    """An order and its times.

    Args:
        tasks: the task graph.
        rows: the actions of every device.
        start: start of every task, in seconds.
        missing: number of every task's inputs, and predecessors on its device, that never ran.
        makespan: end of the last task, in seconds.
    """

    tasks: TaskGraph
    rows: DeviceOrders
    start: Sequence[float]
    missing: Sequence[int]
    makespan: float

    @property
    def deadlocks(self) -> bool:
        """True if tasks wait for each other in a cycle."""
        return any(self.missing)

    @property
    def busy(self) -> float:
        """The longest time of a device from its first start to its last end, in seconds."""
        numbers, seconds = self.tasks.numbers, self.tasks.seconds
        ends = ((numbers[device, row[0]], numbers[device, row[-1]]) for device, row in enumerate(self.rows) if row)
        return max(self.start[last] + seconds[last] - self.start[first] for first, last in ends)


def in_order(tasks: TaskGraph, rows: DeviceOrders) -> FixedOrder:
    """Run every device's actions in their order."""
    order = [[tasks.numbers[device, action] for action in row] for device, row in enumerate(rows)]
    follower, missing = dict(pair for row in order for pair in pairwise(row)), list(tasks.missing)
    for following in follower.values():
        missing[following] += 1
    start, makespan = [0.0 for _ in missing], 0.0
    ready = deque(task for row in order for task in row if not missing[task])
    while ready:
        task = ready.popleft()
        end = start[task] + tasks.seconds[task]
        makespan = max(makespan, end)
        own = ((follower[task], 0.0),) if task in follower else ()
        for reader, travel in (*own, *tasks.readers[task]):
            start[reader] = max(start[reader], end + travel)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return FixedOrder(tasks=tasks, rows=rows, start=start, missing=missing, makespan=makespan)
