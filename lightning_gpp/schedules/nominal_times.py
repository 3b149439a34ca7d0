"""Orders by nominal time: the times of actions in an ideal pipeline, in cells, rank the actions of every device.

Stages are treated by their level, the distance to the sink: all stages of a level act like one stage of a chain.
Nominal times grow along every dependency, so orders sorted by them cannot deadlock, in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.list_scheduling import Task
from lightning_gpp.schedules.work import Work, is_extra

_STEP: Final = 1e-3
"""Minimum difference between the nominal times of an action and its inputs, in cells."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its nominal time, in cells."""

    time: float
    action: Action


TimedRows = list[list[Timed]]
"""The actions of every device, in order."""


def by_nominal_time(work: Work, time: Callable[[Action], float]) -> TimedRows:
    """The actions of every device by nominal time, which is raised where dependencies demand it."""
    depths = work.plan.depths()
    rows: TimedRows = [[] for _ in range(work.plan.num_devices)]
    for (device, action), nominal in _raised(work, time).items():
        rows[device].append(Timed(nominal, action))
    for row in rows:
        row.sort(key=lambda entry: (entry.time, depths[entry.action.stage], entry.action.micro_batch))
    return rows


def _raised(work: Work, time: Callable[[Action], float]) -> Mapping[Task, float]:
    nominal = {task: time(task[1]) for task in work.seconds}
    missing = dict(work.missing)
    ready = [task for task in nominal if not missing[task]]
    while ready:
        task = ready.pop()
        for reader, _ in work.readers[task]:
            nominal[reader] = max(nominal[reader], nominal[task] + _STEP)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return nominal


def levels(plan: Plan) -> tuple[dict[int, int], int]:
    """The level of every stage, and the number of levels: the positions in a chain as long as the graph's depth.

    The number is even, for a chain that turns back halfway; if the depth is odd, no stage is at level 0. An extra stage
    with only the user's step shares the last level with those before it.
    """
    step = int(is_extra(plan, plan.step_stage))
    depths = {stage: max(1, depth - step) for stage, depth in plan.depths().items()}
    length = max(depths.values())
    length += length % 2
    return {stage: length - depth for stage, depth in depths.items()}, length


def coarse_numbers(plan: Plan, batch_size: int) -> list[list[int]]:
    """Number that each micro-batch of each stage would have if all stages had the largest micro-batch size.

    The parts of one large micro-batch share its number, and so its place in an order for micro-batches of one size.
    """
    number, stages = partial(plan.micro_batch_of, stage_of_largest(plan)), range(len(plan.stages))
    return [[number(start, batch_size) for start, _ in plan.intervals(stage, batch_size)] for stage in stages]


def stage_of_largest(plan: Plan) -> int:
    """A stage with the largest micro-batches."""
    return max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].micro_batch_size)


def actions(rows: TimedRows, *, weights: bool = True) -> list[list[Action]]:
    """The order of every device without times, with or without weight gradients."""
    return [[entry.action for entry in row if weights or entry.action.kind is not Kind.WEIGHT] for row in rows]
