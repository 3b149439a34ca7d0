"""Checks a generator's orders, and interleaves the orders of stages into an order of every device, by list scheduling.

A device has lanes, each an order to keep: one per stage if the schedule orders stages and leaves their interleaving to
the scheduler, a single one if it orders devices. Durations are nominal: a sample takes one unit per action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.list_scheduling import Clock, Priorities, Task, TaskGraph, list_schedule
from lightning_gpp.schedules.lowering import all_samples, difference, required_actions
from lightning_gpp.schedules.work import task_graph

StageOrders = Mapping[int, tuple[Action, ...]]
"""The actions of every stage, each micro-batch once, in the order in which a replica runs them. Stages on the same
devices may share one order, under the number of one of them.
"""

Orders = StageOrders | Schedule
"""The result of a generator: the order of every stage, or of every device."""

_URGENCY: Final = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}
_HALVES: Final = (Kind.INPUT, Kind.WEIGHT)

Lanes = Sequence[Sequence[tuple[Action, ...]]]
"""The orders of every device."""


def device_orders(
    plan: Plan, orders: Orders, batch_size: int | None = None, training: bool = True
) -> tuple[Schedule, dict[Task, float]]:
    """The order of every device, and the nominal time at which each of its actions starts.

    Of several ready actions, input gradients start first (they free memory, and others wait for them), then forwards,
    then weight gradients; ties go to the stage nearest to a sink, then to the earlier samples.

    Raises:
        ScheduleError: the orders deadlock in any interleaving.
    """
    total = plan.batch_size if batch_size is None else batch_size
    lanes = _lanes(plan, orders, total)
    tasks, depths = _tasks(plan, lanes, total, training), plan.depths()
    clock = Clock(plan.num_devices, tasks)
    policy = Priorities(
        clock=clock,
        lanes=[[deque(tasks.numbers[device, a] for a in lane) for lane in own] for device, own in enumerate(lanes)],
        ranks=[(_URGENCY.get(a.kind, 0), depths[a.stage], a.micro_batch) for a in tasks.actions],
    )
    list_schedule(clock, policy)
    _check_end(plan, tasks, policy.waiting())
    return Schedule(tuple(map(tuple, clock.rows))), dict(zip(tasks.numbers, clock.began, strict=True))


def _lanes(plan: Plan, orders: Orders, batch_size: int) -> Lanes:
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


def _tasks(plan: Plan, lanes: Lanes, batch_size: int, training: bool) -> TaskGraph:
    samples = all_samples(plan, batch_size)
    seconds: dict[Task, float] = {
        (device, action): samples[device, action.stage][action.micro_batch]
        for device, own in enumerate(lanes)
        for lane in own
        for action in lane
    }
    return task_graph(plan, batch_size, seconds, training=training)


def _check_end(plan: Plan, tasks: TaskGraph, waiting: Sequence[int]) -> None:
    heads = [f"device {tasks.devices[task]}: {tasks.actions[task]}" for task in waiting]
    if heads:
        raise ScheduleError(
            f"The orders of schedule {plan.schedule!r} (strategy.schedule) deadlock; next actions: "
            f"{'; '.join(heads)}. Run more forwards before the first backward."
        )


def check_orders(plan: Plan, orders: Orders, batch_size: int) -> None:
    """Check that every micro-batch runs once through every stage: forward, and full backward or both of its halves.

    Orders may contain recomputations. Data actions and collectives are placed by passes.

    Raises:
        ScheduleError: names the schedule and the device.
    """
    if isinstance(orders, Schedule) and len(orders.devices) != plan.num_devices:
        raise ScheduleError(
            f"Schedule {plan.schedule!r} (strategy.schedule) orders {len(orders.devices)} devices, the plan has "
            f"{plan.num_devices}."
        )
    for device, own in enumerate(_lanes(plan, orders, batch_size)):
        actions = [action for lane in own for action in lane if action.kind is not Kind.RECOMPUTE]
        split = frozenset((action.stage, action.micro_batch) for action in actions if action.kind in _HALVES)
        needed = required_actions(plan, device, batch_size, True, split)
        problem = difference([action for action in needed if action.kind in _URGENCY], actions)
        if problem:
            raise ScheduleError(
                f"Schedule {plan.schedule!r} (strategy.schedule), device {device}: the order must contain the forward "
                f"and the backward of each micro-batch once; it {problem}."
            )
