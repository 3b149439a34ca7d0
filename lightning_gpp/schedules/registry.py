"""Schedules by name. A schedule is a function that gives, for every stage, the order of its forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.merge import merge

StageOrders = Mapping[int, tuple[Action, ...]]
"""For every stage its forwards and backwards, each micro-batch once, in the order in which a replica runs them."""

Generator = Callable[[Plan, int], StageOrders]
"""From a plan and the samples of a mini-batch to the orders of all stages."""

_GENERATORS: Final[dict[str, Generator]] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Make a generator of stage orders available as `strategy.schedule=name`.

    The generator sees one stage at a time: where a device holds several stages, a common pass interleaves them. It
    states the order of training; inference runs the forwards of the same order.

    Raises:
        ScheduleError: the name is taken.
    """

    def add(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ScheduleError(f"A schedule named {name!r} is registered already; choose another name.")
        _GENERATORS[name] = generator
        return generator

    return add


def schedule_names() -> tuple[str, ...]:
    """All names that `strategy.schedule` accepts."""
    return tuple(sorted(_GENERATORS))


def stage_orders(plan: Plan, batch_size: int | None = None) -> StageOrders:
    """The order of forwards and backwards on every stage, by the plan's schedule.

    Raises:
        ScheduleError: the schedule is unknown, or it does not run every micro-batch once, forward before backward.
    """
    total = _checked(plan.batch_size if batch_size is None else batch_size)
    orders = generator_of(plan.schedule)(plan, total)
    for stage in range(len(plan.stages)):
        _check_order(plan, stage, total, orders.get(stage, ()))
    return orders


def make_schedule(plan: Plan, batch_size: int | None = None, training: bool = True) -> Schedule:
    """Order the actions of every device by the plan's schedule.

    Args:
        plan: names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: forwards and backwards; forwards only if False.

    Raises:
        ScheduleError: the schedule is unknown, or its orders cannot run.
    """
    orders = stage_orders(plan, batch_size)
    if not training:
        orders = {stage: tuple(a for a in order if a.kind is Kind.FORWARD) for stage, order in orders.items()}
    return merge(plan, orders, batch_size, training)


def in_flight(plan: Plan, batch_size: int | None = None) -> dict[int, int]:
    """For every stage the most micro-batches that its schedule ever keeps in flight on a replica."""
    return {stage: peak(order) for stage, order in stage_orders(plan, batch_size).items()}


def peak(order: tuple[Action, ...]) -> int:
    """The most micro-batches whose forward began and whose backward did not end, while a stage follows `order`."""
    return max(accumulate(1 if action.kind is Kind.FORWARD else -1 for action in order), default=0)


def generator_of(name: str) -> Generator:
    """The generator registered under a name.

    Raises:
        ScheduleError: there is none.
    """
    try:
        return _GENERATORS[name]
    except KeyError:
        allowed = ", ".join(schedule_names())
        raise ScheduleError(
            f"strategy.schedule={name!r} is not a schedule. Choose one of: {allowed}; or add your own with "
            "@lightning_gpp.schedules.register(...) before the trainer starts."
        ) from None


def _checked(batch_size: int) -> int:
    if batch_size < 1:
        raise ScheduleError(f"A mini-batch needs at least 1 sample per pipeline replica, got batch_size={batch_size}.")
    return batch_size


def _check_order(plan: Plan, stage: int, batch_size: int, order: tuple[Action, ...]) -> None:
    numbers = range(len(plan.intervals(stage, batch_size)))
    expected = {Action(stage, kind, number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in numbers}
    where = f"Schedule {plan.schedule!r} (strategy.schedule), stage {plan.stages[stage].name!r}"
    if len(order) != len(expected) or set(order) != expected:
        raise ScheduleError(
            f"{where}: the order must hold the forward and the backward of each of {len(numbers)} micro-batches once, "
            f"got {' '.join(map(str, order)) or 'nothing'}."
        )
    position = {action: index for index, action in enumerate(order)}
    for number in numbers:
        if position[Action(stage, Kind.BACKWARD, number)] < position[Action(stage, Kind.FORWARD, number)]:
            raise ScheduleError(f"{where}: the backward of micro-batch {number} comes before its forward.")
