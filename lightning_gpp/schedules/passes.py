"""What every schedule gets, whatever its order: recomputation, and the data just in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lowering import reads_data
from lightning_gpp.schedules.messages import derive_messages
from lightning_gpp.schedules.task_graph import Task

LEAD: Final = 2
"""Micro-batches by which data are ahead of the first stage that reads them."""


def with_recomputation(plan: Plan, schedule: Schedule) -> Schedule:
    """Run recomputed stages again right before their backwards, unless the schedule says when.

    That is in front of the backward's wait for its gradients, which it fills.
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
    """Run the user's step up to the network for every micro-batch, a little before the first stage reads it.

    What stands in front of a data action was started before the actions that read its data, and so cannot wait for it.
    """
    if not reads_data(plan):
        return schedule
    rows = list(schedule.devices)
    for device, due in _due(plan, started, batch_size, training).items():
        rows[device] = _woven(device, rows[device], due, started)
    return Schedule(tuple(rows))


def _due(plan: Plan, started: Mapping[Task, float], batch_size: int, training: bool) -> dict[int, dict[Action, float]]:
    """For every device of the step its data actions in order, and when they have to be there."""
    lead = LEAD * plan.stages[plan.step_stage].micro_batch_size
    due: dict[int, dict[Action, float]] = {
        device: {
            Action(plan.step_stage, Kind.DATA, number): max(started.values(), default=0)
            for number in plan.micro_batches(plan.step_stage, device, batch_size)
        }
        for device in plan.devices_of(SOURCE)
    }
    for message in derive_messages(plan, batch_size, training=False):
        if plan.edges[message.edge].src == SOURCE:
            row = due[message.src]
            row[message.producer] = min(row[message.producer], started[message.dst, message.consumer] - lead)
    return {device: _monotone(row) for device, row in due.items()}


def _monotone(row: dict[Action, float]) -> dict[Action, float]:
    """Each no later than those after it."""
    latest: dict[Action, float] = {}
    for action in reversed(row):
        latest[action] = min([row[action], *list(latest.values())[-1:]])
    return dict(reversed(latest.items()))


def _woven(
    device: int, actions: tuple[Action, ...], due: Mapping[Action, float], started: Mapping[Task, float]
) -> tuple[Action, ...]:
    result: list[Action] = []
    waiting = list(due)
    for action in actions:
        while waiting and due[waiting[0]] <= started.get((device, action), 0):
            result.append(waiting.pop(0))
        result.append(action)
    return (*result, *waiting)
