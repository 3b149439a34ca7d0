"""Checks the orders of a generator: each action once, forward before backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.device_orders import Orders, StageOrders
from lightning_gpp.schedules.lowering import difference

_SPLIT: Final = (Kind.INPUT, Kind.WEIGHT)


def check_orders(plan: Plan, orders: Orders, batch_size: int) -> None:
    """Check that every micro-batch runs once through every stage: forward, then full backward or both of its halves.

    Orders may contain recomputations. Data actions and collectives are placed by passes.

    Raises:
        ScheduleError: names the schedule and the stage or device.
    """
    if isinstance(orders, Schedule):
        if len(orders.devices) != plan.num_devices:
            raise ScheduleError(
                f"Schedule {plan.schedule!r} (strategy.schedule) orders {len(orders.devices)} devices, the plan has "
                f"{plan.num_devices}."
            )
        for device, actions in enumerate(orders.devices):
            stages = [(stage, plan.micro_batches(stage, device, batch_size)) for stage in plan.stages_on(device)]
            _check(f"device {device}", plan, stages, actions)
        return
    for stage, members in _lanes(plan, orders).items():
        numbers = list(range(len(plan.intervals(stage, batch_size))))
        stages = [(member, numbers) for member in members]
        _check(f"stage {plan.stages[stage].name!r}", plan, stages, orders.get(stage, ()))


def _lanes(plan: Plan, orders: StageOrders) -> dict[int, list[int]]:
    """For every order the stages in it; a stage that is in none should have one of its own."""
    lanes = {stage: sorted({stage, *(action.stage for action in order)}) for stage, order in orders.items()}
    known = {member for members in lanes.values() for member in members}
    return lanes | {stage: [stage] for stage in range(len(plan.stages)) if stage not in known}


def _check(owner: str, plan: Plan, stages: Iterable[tuple[int, Sequence[int]]], actions: Sequence[Action]) -> None:
    where = f"Schedule {plan.schedule!r} (strategy.schedule), {owner}"
    split = {(action.stage, action.micro_batch) for action in actions if action.kind in (Kind.INPUT, Kind.WEIGHT)}
    needed = [
        Action(stage, kind, number)
        for stage, numbers in stages
        for number in numbers
        for kind in (Kind.FORWARD, *(_SPLIT if (stage, number) in split else (Kind.BACKWARD,)))
    ]
    problem = difference(needed, [action for action in actions if action.kind is not Kind.RECOMPUTE])
    if problem:
        raise ScheduleError(
            f"{where}: the order must hold the forward and the backward of each micro-batch once; it {problem}."
        )
    _check_sequence(where, actions)


FIRST: Final = {
    Kind.RECOMPUTE: (Kind.FORWARD, "forward"),
    Kind.BACKWARD: (Kind.FORWARD, "forward"),
    Kind.INPUT: (Kind.FORWARD, "forward"),
    Kind.WEIGHT: (Kind.INPUT, "input gradients"),
}
"""For every kind the kind of the same micro-batch's action that must come before, and its name."""


def _check_sequence(where: str, actions: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in actions:
        kind, name = FIRST.get(action.kind, (None, ""))
        if kind is not None and action._replace(kind=kind) not in done:
            raise ScheduleError(f"{where}: {action} comes before the {name} of the same micro-batch.")
        done.add(action)
