"""From orders to a schedule: all devices are played against a clock, and what each started is its list.

A device has lanes, each an order that it keeps: one for each of its stages where the schedule orders stages and leaves
their interleaving to the clock, a single one where it orders devices. The clock knows no hardware: a sample takes one
unit per action. An action starts when its inputs are there, its lane has come to it and its device is free. Since only
actions that can run are started, the resulting lists cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.clock import Clock
from lightning_gpp.schedules.messages import samples_of
from lightning_gpp.schedules.tasks import Task, numbered
from lightning_gpp.schedules.work import links

StageOrders = Mapping[int, tuple[Action, ...]]
"""For every stage its actions, each micro-batch once, in the order in which a replica runs them. Stages on the same
devices may have one order together, under the number of one of them."""

Orders = StageOrders | Schedule
"""What a generator states: the order on every stage, or on every device."""

_URGENCY: Final = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}


def merge(
    plan: Plan, orders: Orders, batch_size: int | None = None, training: bool = True
) -> tuple[Schedule, dict[Task, float]]:
    """The list of every device, and the unit of time at which the clock started each of its actions.

    Of several actions that could start, gradients of inputs win (they free memory, and others wait for them), then
    forwards, then gradients of parameters; then the stage nearest to a sink, then the earlier samples.

    Raises:
        ScheduleError: the orders wait for each other, in any interleaving.
    """
    total = plan.batch_size if batch_size is None else batch_size
    run = _Run(plan, _lanes(plan, orders, total), total, training)
    run.play()
    return Schedule(tuple(map(tuple, run.clock.rows))), run.started


def _lanes(plan: Plan, orders: Orders, batch_size: int) -> list[list[tuple[Action, ...]]]:
    if isinstance(orders, Schedule):
        return [[actions] for actions in orders.devices]
    return [
        [
            _of_replica(plan, orders[stage], stage, device, batch_size)
            for stage in plan.stages_on(device)
            if stage in orders
        ]
        for device in range(plan.num_devices)
    ]


def _of_replica(plan: Plan, order: tuple[Action, ...], stage: int, device: int, batch_size: int) -> tuple[Action, ...]:
    if not plan.stages[stage].round_robin:
        return order
    mine = set(plan.micro_batches(stage, device, batch_size))
    return tuple(action for action in order if action.micro_batch in mine)


@dataclass(slots=True)
class _Run:
    plan: Plan
    lanes: Sequence[Sequence[tuple[Action, ...]]]
    batch_size: int
    training: bool
    clock: Clock = field(init=False)
    started: dict[Task, float] = field(default_factory=dict)
    position: list[list[int]] = field(init=False)
    depths: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = [[0] * len(lanes) for lanes in self.lanes]
        self.depths = self.plan.depths()
        tasks = [(i, action) for i, lanes in enumerate(self.lanes) for lane in lanes for action in lane]
        samples = {
            (device, stage): samples_of(self.plan, stage, device, self.batch_size)
            for device in range(len(self.lanes))
            for stage in self.plan.stages_on(device)
        }
        seconds = {(i, action): samples[i, action.stage][action.micro_batch] for i, action in tasks}
        missing, readers = links(self.plan, self.batch_size, tasks, training=self.training, travels=False)
        self.clock = Clock(len(self.lanes), numbered(seconds, readers, missing))

    def play(self) -> None:
        for device in self.clock.turns():
            self._start(device)
        self._check_end()

    def _start(self, device: int) -> None:
        numbers = self.clock.tasks.numbers
        ready = [(action, lane) for action, lane in self._heads(device) if self.clock.is_ready(numbers[device, action])]
        if ready:
            action, lane = min(ready, key=self._rank)
            self.clock.start(numbers[device, action])
            self.started[device, action] = self.clock.time
            self.position[device][lane] += 1

    def _heads(self, device: int) -> list[tuple[Action, int]]:
        """The next action of every lane, and the lane's number."""
        positions = self.position[device]
        return [(lane[positions[i]], i) for i, lane in enumerate(self.lanes[device]) if positions[i] < len(lane)]

    def _rank(self, head: tuple[Action, int]) -> tuple[int, int, int]:
        action, _ = head
        return _URGENCY.get(action.kind, 0), self.depths[action.stage], action.micro_batch

    def _check_end(self) -> None:
        waiting = [f"device {device}: {head}" for device in range(len(self.lanes)) for head, _ in self._heads(device)]
        if waiting:
            raise ScheduleError(
                f"The orders of schedule {self.plan.schedule!r} (strategy.schedule) wait for each other, next "
                f"actions: {'; '.join(waiting)}. Run more forwards before the first backward."
            )
