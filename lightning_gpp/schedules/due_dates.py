"""List scheduling by due date: of the ready tasks, a device starts the one that is due first.

Due dates are those of a steady pipeline. Micro-batches enter at the pace of the busiest device, all pipelines at once.
A forward (backward) is due `Pace.forward` (`Pace.backward`) cycles after that of the neighbouring stage; a cycle is the
mean time of a stage per micro-batch. Due dates only rank: a task starts when its inputs are there and its device is
free, so nothing deadlocks.

A forward also waits until its device has memory for it. If all devices wait for memory, the task that is due first
starts beyond the limit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.list_scheduling import Clock, DeviceOrders, Priorities, list_schedule
from lightning_gpp.schedules.work import Work, turns


class Pace(NamedTuple):
    """Cycles between forwards, and between backwards, of neighbouring stages. Slow backwards let forwards overtake."""

    forward: float
    backward: float


def by_due_date(work: Work, limits: Sequence[float], due: Mapping[Action, float]) -> DeviceOrders:
    """The order of every device.

    Args:
        work: the plan's work, with full backwards.
        limits: bytes that the tasks of every device may hold.
        due: due date of every action, in seconds from the start.
    """
    clock, tasks = Clock(len(limits), work.tasks), work.tasks
    lanes: dict[tuple[int, int, Kind], deque[int]] = defaultdict(deque)
    for (device, (stage, kind, _)), number in tasks.numbers.items():
        lanes[device, stage, kind].append(number)
    policy = Priorities(
        clock=clock,
        lanes=[[lane for place, lane in lanes.items() if place[0] == device] for device in range(len(limits))],
        ranks=[(due[a], device, a.stage, a.kind is Kind.FORWARD) for device, a in tasks.numbers],
        limits=limits,
    )
    list_schedule(clock, policy)
    return clock.rows


def due_dates(work: Work, pace: Pace) -> dict[Action, float]:
    """The due date of every action, in seconds from the start."""
    plan, busy, depths = work.plan, work.loads(), work.plan.depths()
    per_sample = max(busy) / work.batch_size
    cycle = sum(busy) / sum(len(plan.intervals(stage, work.batch_size)) for stage in range(len(plan.stages)))
    deepest = max(depths.values())
    due = {}
    for _, action in work.seconds:
        depth = depths[action.stage]
        cycles = (deepest - depth) * pace.forward
        if action.kind is Kind.BACKWARD:
            cycles = deepest * pace.forward + (depth - 1) * pace.backward
        due[action] = _entry(plan, action) * per_sample + cycles * cycle
    return due


def _entry(plan: Plan, action: Action) -> int:
    """Samples that enter before a micro-batch. Replicas in round robin start theirs at the same time."""
    together = turns(plan.stages[action.stage])
    return action.micro_batch // together * together * plan.stages[action.stage].micro_batch_size
