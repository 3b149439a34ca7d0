"""Orders by due times: times in an ideal pipeline, in cells, that rank the actions of every device.

Stages are ranked by their level, that is by their distance to the sink, so that all stages of a level act as the one
stage of a chain. Times increase along all dependencies, so devices that follow them cannot wait in a circle, wherever
their stages lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.task_graph import Task
from lightning_gpp.schedules.work import Work, is_extra

_STEP: Final = 1e-3
"""Cells by which an action is due after those that it waits for, at least."""


@dataclass(frozen=True, slots=True)
class Due:
    """An action, and the cell in which it is due."""

    time: float
    action: Action


DueRows = list[list[Due]]
"""For every device its actions, in order."""


def by_due_times(work: Work, time: Callable[[Action], float]) -> DueRows:
    """The actions of every device by the time at which they are due, later where those that they wait for are."""
    depths = work.plan.depths()
    rows: DueRows = [[] for _ in range(work.plan.num_devices)]
    for (device, action), due in _raised(work, time).items():
        rows[device].append(Due(due, action))
    for row in rows:
        row.sort(key=lambda entry: (entry.time, depths[entry.action.stage], entry.action.micro_batch))
    return rows


def _raised(work: Work, time: Callable[[Action], float]) -> Mapping[Task, float]:
    due = {task: time(task[1]) for task in work.seconds}
    missing = dict(work.missing)
    ready = [task for task in due if not missing[task]]
    while ready:
        task = ready.pop()
        for reader, _ in work.readers[task]:
            due[reader] = max(due[reader], due[task] + _STEP)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return due


def levels(plan: Plan) -> tuple[dict[int, int], int]:
    """For every stage its position in a chain that is as long as the graph is deep, the sink last; and that length.

    The length is even, for a chain that turns back halfway: where the graph's depth is not, no stage is at position 0.
    A stage of the user's step that is extra shares the last position with those before it.
    """
    step = int(is_extra(plan, plan.step_stage))
    depths = {stage: max(1, depth - step) for stage, depth in plan.depths().items()}
    length = max(depths.values())
    length += length % 2
    return {stage: length - depth for stage, depth in depths.items()}, length


def coarse_numbers(plan: Plan, batch_size: int) -> list[list[int]]:
    """For every stage and micro-batch the one with its first sample, were all stages' as large as the largest.

    Small ones that make up a large one have one number, and so one place in an order for micro-batches of one size.
    """
    largest = max(stage.micro_batch_size for stage in plan.stages)
    return [[start // largest for start, _ in plan.intervals(i, batch_size)] for i in range(len(plan.stages))]


def actions(rows: DueRows, *, weights: bool = True) -> list[list[Action]]:
    """What devices do, without the times, with or without gradients of parameters."""
    return [[entry.action for entry in row if weights or entry.action.kind is not Kind.WEIGHT] for row in rows]
