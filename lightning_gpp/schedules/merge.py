"""From the order on every stage to the order on every device, which may hold several stages.

All devices are played against a clock on which a sample takes one unit per action. An action starts when its inputs
are there, its stage's order has come to it and its device is free. Since only actions that can run are started, the
resulting orders cannot wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.messages import derive_messages, samples_of

Task = tuple[int, Action]
"""An action on one device."""


def merge(
    plan: Plan, orders: Mapping[int, tuple[Action, ...]], batch_size: int | None = None, training: bool = True
) -> Schedule:
    """Interleave the orders of the stages on each device; data actions come first on the devices of the step.

    Of several actions that could start, a backward wins (it frees memory), then the stage nearest to a sink, then the
    earlier samples.

    Raises:
        ScheduleError: the orders wait for each other, in any interleaving.
    """
    clock = _Clock(plan, orders, plan.batch_size if batch_size is None else batch_size, training)
    clock.run()
    return Schedule(tuple(tuple(clock.data(device) + clock.done[device]) for device in range(plan.num_devices)))


@dataclass(slots=True)
class _Clock:
    plan: Plan
    orders: Mapping[int, tuple[Action, ...]]
    batch_size: int
    training: bool
    done: list[list[Action]] = field(init=False)
    position: dict[tuple[int, int], int] = field(init=False)
    stages: list[tuple[int, ...]] = field(init=False)
    missing: dict[Task, int] = field(init=False)
    readers: dict[Task, list[Task]] = field(init=False)
    samples: dict[tuple[int, int], list[int]] = field(init=False)
    depths: dict[int, int] = field(init=False)
    busy: set[int] = field(default_factory=set)
    events: list[tuple[int, int, int, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        devices = range(self.plan.num_devices)
        self.done = [[] for _ in devices]
        self.stages = [self.plan.stages_on(device) for device in devices]
        self.position = {(device, stage): 0 for device in devices for stage in self.stages[device]}
        self.samples = {key: samples_of(self.plan, key[1], key[0], self.batch_size) for key in self.position}
        self.depths = self.plan.depths()
        self.missing, self.readers = defaultdict(int), defaultdict(list)
        for message in derive_messages(self.plan, self.batch_size, self.training):
            if self.plan.edges[message.edge].src != SOURCE:
                self.missing[message.dst, message.consumer] += 1
                self.readers[message.src, message.producer].append((message.dst, message.consumer))

    def data(self, device: int) -> list[Action]:
        stage = self.plan.step_stage
        if device not in self.plan.devices_of(stage) or not any(edge.src == SOURCE for edge in self.plan.edges):
            return []
        return [Action(stage, Kind.DATA, i) for i in range(len(self.plan.intervals(stage, self.batch_size)))]

    def run(self) -> None:
        for device in range(self.plan.num_devices):
            self._start(device, 0)
        while self.events:
            time = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] == time:
                touched |= self._finish()
            for device in sorted(touched):
                self._start(device, time)
        self._check_end()

    def _finish(self) -> set[int]:
        _, _, device, action = heapq.heappop(self.events)
        self.busy.discard(device)
        readers = self.readers[device, action]
        for reader in readers:
            self.missing[reader] -= 1
        return {device, *(reader[0] for reader in readers)}

    def _start(self, device: int, time: int) -> None:
        ready = [action for action in self._heads(device) if not self.missing[device, action]]
        if device in self.busy or not ready:
            return
        action = min(ready, key=self._rank)
        self.busy.add(device)
        self.done[device].append(action)
        self.position[device, action.stage] += 1
        heapq.heappush(self.events, (time + self._duration(device, action), len(self.done[device]), device, action))

    def _heads(self, device: int) -> list[Action]:
        heads = []
        for stage in self.stages[device]:
            order, position = self.orders[stage], self.position[device, stage]
            if position < len(order):
                heads.append(order[position])
        return heads

    def _rank(self, action: Action) -> tuple[bool, int, int]:
        return action.kind is not Kind.BACKWARD, self.depths[action.stage], action.micro_batch

    def _duration(self, device: int, action: Action) -> int:
        return self.samples[device, action.stage][action.micro_batch]

    def _check_end(self) -> None:
        waiting = [f"device {device}: {head}" for device in range(len(self.done)) for head in self._heads(device)]
        if waiting:
            raise ScheduleError(
                f"The stage orders of schedule {self.plan.schedule!r} (strategy.schedule) wait for each other, next "
                f"actions: {'; '.join(waiting)}. Run more forwards before the first backward."
            )
