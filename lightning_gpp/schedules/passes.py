"""Passes that every schedule gets: recomputation, and data actions just in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lowering import reads_data
from lightning_gpp.schedules.messages import derive_messages
from lightning_gpp.schedules.task_graph import Task

LEAD: Final = 2
"""Micro-batches by which data actions are ahead of the first stage that reads them."""


def with_recomputation(plan: Plan, schedule: Schedule) -> Schedule:
    """Insert recomputations right before the backwards of recomputed stages, unless the schedule states them.

    They run before the backward waits for its gradients, and so fill that wait.
    """
    again = {stage for stage in range(len(plan.stages)) if plan.stages[stage].recompute}
    placed = {action for actions in schedule.devices for action in actions if action.kind is Kind.RECOMPUTE}

    def expanded(action: Action) -> tuple[Action, ...]:
        first = action._replace(kind=Kind.RECOMPUTE)
        needs = action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage in again and first not in placed
        return (first, action) if needs else (action,)

    if not again:
        return schedule
    return Schedule(tuple(tuple(new for old in actions for new in expanded(old)) for actions in schedule.devices))


def with_data(
    plan: Plan, schedule: Schedule, started: Mapping[Task, float], batch_size: int, training: bool
) -> Schedule:
    """Insert the data action of every micro-batch a little before the first stage reads it.

    All actions in front of a data action start before those that read its data, so none of them waits for it.
    """
    if not reads_data(plan):
        return schedule
    rows = list(schedule.devices)
    for device, deadlines in _deadlines(plan, started, batch_size, training).items():
        rows[device] = _woven(device, rows[device], deadlines, started)
    return Schedule(tuple(rows))


def _deadlines(
    plan: Plan, started: Mapping[Task, float], batch_size: int, training: bool
) -> dict[int, dict[Action, float]]:
    """For every device of the user's step its data actions in order, each with the latest nominal time."""
    lead = LEAD * plan.stages[plan.step_stage].micro_batch_size
    deadlines: dict[int, dict[Action, float]] = {
        device: {
            Action(plan.step_stage, Kind.DATA, number): max(started.values(), default=0)
            for number in plan.micro_batches(plan.step_stage, device, batch_size)
        }
        for device in plan.devices_of(SOURCE)
    }
    for message in derive_messages(plan, batch_size, training=False):
        if plan.edges[message.edge].src == SOURCE:
            row = deadlines[message.src]
            row[message.producer] = min(row[message.producer], started[message.dst, message.consumer] - lead)
    return {device: _monotone(row) for device, row in deadlines.items()}


def _monotone(row: dict[Action, float]) -> dict[Action, float]:
    """The same times, none later than those after it."""
    latest: dict[Action, float] = {}
    for action in reversed(row):
        latest[action] = min([row[action], *list(latest.values())[-1:]])
    return dict(reversed(latest.items()))


def _woven(
    device: int, actions: tuple[Action, ...], deadlines: Mapping[Action, float], started: Mapping[Task, float]
) -> tuple[Action, ...]:
    result: list[Action] = []
    waiting = list(deadlines)
    for action in actions:
        while waiting and deadlines[waiting[0]] <= started.get((device, action), 0):
            result.append(waiting.pop(0))
        result.append(action)
    return (*result, *waiting)
