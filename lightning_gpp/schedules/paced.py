"""Orders for devices that hold several stages and pipelines: a clock starts what is furthest behind a steady pace.

Every action has a time at which it is due. Micro-batches enter at the pace of the busiest device, all pipelines at
once; their forwards and backwards move on by a stage in so and so many cycles, a cycle being what a stage takes for a
micro-batch. What is due first runs first. Due times only rank: an action starts when its inputs are there and its
device is free, so nothing waits in a circle.

A forward also waits while its device has no room for one more micro-batch. If all devices wait for room, the action
that is due first gets it nevertheless.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.merge import Task
from lightning_gpp.schedules.messages import derive_messages, samples_of


class Pace(NamedTuple):
    """Cycles in which a forward, and a backward, moves on by a stage. Slow backwards let later forwards go first."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the actions of a plan take, keep and wait for.

    Args:
        seconds: of every forward and backward of every device.
        kept: by every forward until its backward; bytes, or samples.
        room: of every device for what is kept.
        missing: for every task the number of those that it waits for.
        readers: for every task those that wait for it, and the seconds until they have what it made.
    """

    seconds: Mapping[Task, float]
    kept: Mapping[Task, float]
    room: tuple[float, ...]
    missing: Mapping[Task, int]
    readers: Mapping[Task, Sequence[tuple[Task, float]]]


def paced(plan: Plan, batch_size: int, load: Load, pace: Pace) -> Schedule:
    """The order on every device."""
    clock = _Clock(plan, batch_size, load, pace)
    clock.run()
    return Schedule(tuple(map(tuple, clock.done)))


@dataclass(slots=True)
class _Clock:
    plan: Plan
    batch_size: int
    load: Load
    pace: Pace
    time: float = 0.0
    done: list[list[Action]] = field(init=False)
    kept: list[float] = field(init=False)
    lanes: list[list[list[Action]]] = field(init=False)
    due: Mapping[Action, float] = field(init=False)
    missing: dict[Task, int] = field(init=False)
    busy: set[int] = field(default_factory=set)
    events: list[tuple[float, int, Task, bool]] = field(default_factory=list)
    """Time, number, task; and whether the task ends then, or has one of its inputs."""
    count: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        devices = range(self.plan.num_devices)
        self.done, self.kept = [[] for _ in devices], [0.0 for _ in devices]
        self.due = due_times(self.plan, self.batch_size, self.load.seconds, self.pace)
        self.lanes = [self._lanes(device) for device in devices]
        self.missing = dict(self.load.missing)

    def _lanes(self, device: int) -> list[list[Action]]:
        """Forwards and backwards of each stage, the next one last."""
        numbers = {s: self.plan.micro_batches(s, device, self.batch_size) for s in self.plan.stages_on(device)}
        kinds = (Kind.BACKWARD, Kind.FORWARD)
        return [[Action(stage, kind, n) for n in reversed(numbers[stage])] for stage in numbers for kind in kinds]

    def run(self) -> None:
        waiting = set(range(self.plan.num_devices))
        while waiting or self.events or self._crowd():
            for device in sorted(waiting):
                self._start(device, self._fits)
            waiting = self._advance()

    def _advance(self) -> set[int]:
        """Go on to the next time at which something happens; devices that may start something then."""
        touched: set[int] = set()
        if self.events:
            self.time = self.events[0][0]
        while self.events and self.events[0][0] == self.time:
            _, _, task, ends = heapq.heappop(self.events)
            if ends:
                self._finish(*task)
            else:
                self.missing[task] -= 1
            touched.add(task[0])
        return touched

    def _finish(self, device: int, action: Action) -> None:
        self.busy.discard(device)
        if action.kind is Kind.BACKWARD:
            self.kept[device] -= self.load.kept[device, action._replace(kind=Kind.FORWARD)]
        for reader, seconds in self.load.readers.get((device, action), ()):
            self._expect(seconds, reader, ends=False)

    def _expect(self, seconds: float, task: Task, ends: bool) -> None:
        heapq.heappush(self.events, (self.time + seconds, next(self.count), task, ends))

    def _crowd(self) -> bool:
        """Where every device waits for room: start one action all the same. Whether there was any."""
        heads = [
            (self.due[lane[-1]], device)
            for device, lanes in enumerate(self.lanes)
            for lane in lanes
            if lane and not self.missing.get((device, lane[-1]))
        ]
        if heads:
            self._start(min(heads)[1], lambda device, action: True)
        return bool(heads)

    def _start(self, device: int, fits: Callable[[int, Action], bool]) -> None:
        ready = [lane for lane in self.lanes[device] if lane and not self.missing.get((device, lane[-1]))]
        ready = [lane for lane in ready if fits(device, lane[-1])]
        if device in self.busy or not ready:
            return
        action = min(ready, key=lambda lane: self.due[lane[-1]]).pop()
        self.busy.add(device)
        self.done[device].append(action)
        if action.kind is Kind.FORWARD:
            self.kept[device] += self.load.kept[device, action]
        self._expect(self.load.seconds[device, action], (device, action), ends=True)

    def _fits(self, device: int, action: Action) -> bool:
        if action.kind is not Kind.FORWARD:
            return True
        return self.kept[device] + self.load.kept[device, action] <= self.load.room[device]


def dependencies(plan: Plan, batch_size: int) -> tuple[dict[Task, int], dict[Task, list[tuple[Task, float]]]]:
    """For every task the number of tasks that it waits for, and the tasks that wait for it, with their messages'
    seconds."""
    missing: dict[Task, int] = defaultdict(int)
    readers: dict[Task, list[tuple[Task, float]]] = defaultdict(list)

    def depends(reader: Task, maker: Task, seconds: float = 0.0) -> None:
        missing[reader] += 1
        readers[maker].append((reader, seconds))

    for message in derive_messages(plan, batch_size, training=True):
        edge = plan.edges[message.edge]
        if edge.src != SOURCE:
            seconds = edge.seconds.at(message.stop - message.start) if message.src != message.dst else 0.0
            depends((message.dst, message.consumer), (message.src, message.producer), seconds)
    for task in computing(plan, batch_size):
        device, action = task
        if action.kind is Kind.BACKWARD:
            depends(task, (device, action._replace(kind=Kind.FORWARD)))
    return missing, readers


def computing(plan: Plan, batch_size: int) -> dict[Task, int]:
    """Every forward and backward of every device, with the samples of its share."""
    tasks = {}
    for device in range(plan.num_devices):
        for stage in plan.stages_on(device):
            samples = samples_of(plan, stage, device, batch_size)
            for number in plan.micro_batches(stage, device, batch_size):
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    tasks[device, Action(stage, kind, number)] = samples[number]
    return tasks


def due_times(plan: Plan, batch_size: int, seconds: Mapping[Task, float], pace: Pace) -> dict[Action, float]:
    """When each action is due, in seconds from the start."""
    busy = [0.0] * plan.num_devices
    for (device, _), time in seconds.items():
        busy[device] += time
    per_sample = max(busy) / batch_size
    cycle = sum(busy) / sum(len(plan.intervals(stage, batch_size)) for stage in range(len(plan.stages)))
    depths = plan.depths()
    deepest = max(depths.values())
    due = {}
    for _, action in seconds:
        depth = depths[action.stage]
        cycles = (deepest - depth) * pace.forward
        if action.kind is Kind.BACKWARD:
            cycles = deepest * pace.forward + (depth - 1) * pace.backward
        due[action] = _entry(plan, action) * per_sample + cycles * cycle
    return due


def _entry(plan: Plan, action: Action) -> int:
    """Samples ahead of a micro-batch, or of those that other replicas take at the same time."""
    stage = plan.stages[action.stage]
    together = len(stage.devices) if stage.round_robin else 1
    return action.micro_batch // together * together * stage.micro_batch_size
