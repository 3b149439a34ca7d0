"""From orders to a schedule: all devices are played against a clock, and what each started is its list.

A device has lanes, each an order that it keeps: one for each of its stages where the schedule orders stages and leaves
their interleaving to the clock, a single one where it orders devices. The clock knows no hardware: a sample takes one
unit per action. An action starts when its inputs are there, its lane has come to it and its device is free. Since only
actions that can run are started, the resulting lists cannot wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.messages import derive_messages, samples_of

Task = tuple[int, Action]
"""An action on one device."""

StageOrders = Mapping[int, tuple[Action, ...]]
"""For every stage its actions, each micro-batch once, in the order in which a replica runs them."""

Orders = StageOrders | Schedule
"""What a generator states: the order on every stage, or on every device."""

_URGENCY: Final = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}


def merge(
    plan: Plan, orders: Orders, batch_size: int | None = None, training: bool = True
) -> tuple[Schedule, dict[Task, int]]:
    """The list of every device, and the unit of time at which the clock started each of its actions.

    Of several actions that could start, gradients of inputs win (they free memory, and others wait for them), then
    forwards, then gradients of parameters; then the stage nearest to a sink, then the earlier samples.

    Raises:
        ScheduleError: the orders wait for each other, in any interleaving.
    """
    total = plan.batch_size if batch_size is None else batch_size
    clock = _Clock(plan, _lanes(plan, orders, total), total, training)
    clock.run()
    return Schedule(tuple(map(tuple, clock.done))), clock.started


def _lanes(plan: Plan, orders: Orders, batch_size: int) -> list[list[tuple[Action, ...]]]:
    if isinstance(orders, Schedule):
        return [[actions] for actions in orders.devices]
    return [
        [_of_replica(plan, orders[stage], stage, device, batch_size) for stage in plan.stages_on(device)]
        for device in range(plan.num_devices)
    ]


def _of_replica(plan: Plan, order: tuple[Action, ...], stage: int, device: int, batch_size: int) -> tuple[Action, ...]:
    if not plan.stages[stage].round_robin:
        return order
    mine = set(plan.micro_batches(stage, device, batch_size))
    return tuple(action for action in order if action.micro_batch in mine)


@dataclass(slots=True)
class _Clock:
    plan: Plan
    lanes: Sequence[Sequence[tuple[Action, ...]]]
    batch_size: int
    training: bool
    done: list[list[Action]] = field(init=False)
    started: dict[Task, int] = field(default_factory=dict)
    position: list[list[int]] = field(init=False)
    missing: dict[Task, int] = field(init=False)
    readers: dict[Task, list[Task]] = field(init=False)
    samples: dict[tuple[int, int], list[int]] = field(init=False)
    depths: dict[int, int] = field(init=False)
    busy: set[int] = field(default_factory=set)
    events: list[tuple[int, int, int, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = [[] for _ in self.lanes]
        self.position = [[0] * len(lanes) for lanes in self.lanes]
        self.samples = {
            (device, stage): samples_of(self.plan, stage, device, self.batch_size)
            for device in range(len(self.lanes))
            for stage in self.plan.stages_on(device)
        }
        self.depths = self.plan.depths()
        self.missing, self.readers = defaultdict(int), defaultdict(list)
        for message in derive_messages(self.plan, self.batch_size, self.training, self._split()):
            if self.plan.edges[message.edge].src != SOURCE:
                self._depends((message.dst, message.consumer), (message.src, message.producer))
        self._follow_own_actions()

    def _split(self) -> frozenset[tuple[int, int]]:
        actions = (action for lanes in self.lanes for lane in lanes for action in lane)
        return frozenset((action.stage, action.micro_batch) for action in actions if action.kind is Kind.INPUT)

    def _follow_own_actions(self) -> None:
        """The gradients of a micro-batch come after its forward, those of the parameters last."""
        for device, lanes in enumerate(self.lanes):
            for action in (action for lane in lanes for action in lane):
                if action.kind in (Kind.BACKWARD, Kind.INPUT):
                    self._depends((device, action), (device, action._replace(kind=Kind.FORWARD)))
                elif action.kind is Kind.WEIGHT:
                    self._depends((device, action), (device, action._replace(kind=Kind.INPUT)))

    def _depends(self, reader: Task, maker: Task) -> None:
        self.missing[reader] += 1
        self.readers[maker].append(reader)

    def run(self) -> None:
        for device in range(len(self.lanes)):
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
        ready = [(action, lane) for action, lane in self._heads(device) if not self.missing[device, action]]
        if device in self.busy or not ready:
            return
        action, lane = min(ready, key=self._rank)
        self.busy.add(device)
        self.done[device].append(action)
        self.started[device, action] = time
        self.position[device][lane] += 1
        heapq.heappush(self.events, (time + self._duration(device, action), len(self.done[device]), device, action))

    def _heads(self, device: int) -> list[tuple[Action, int]]:
        """The next action of every lane, and the lane's number."""
        positions = self.position[device]
        return [(lane[positions[i]], i) for i, lane in enumerate(self.lanes[device]) if positions[i] < len(lane)]

    def _rank(self, head: tuple[Action, int]) -> tuple[int, int, int]:
        action, _ = head
        return _URGENCY.get(action.kind, 0), self.depths[action.stage], action.micro_batch

    def _duration(self, device: int, action: Action) -> int:
        return self.samples[device, action.stage][action.micro_batch]

    def _check_end(self) -> None:
        waiting = [f"device {device}: {head}" for device in range(len(self.done)) for head, _ in self._heads(device)]
        if waiting:
            raise ScheduleError(
                f"The orders of schedule {self.plan.schedule!r} (strategy.schedule) wait for each other, next "
                f"actions: {'; '.join(waiting)}. Run more forwards before the first backward."
            )
