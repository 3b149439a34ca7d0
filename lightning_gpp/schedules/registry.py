"""Registry of schedules, and the passes from a plan that names one to a verified program.

A generator is a function that orders the actions of every stage, or of every device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan, Stage
from lightning_gpp.registry import Registry
from lightning_gpp.schedules.actions import RELEASES, Action, Kind, Schedule
from lightning_gpp.schedules.device_orders import Orders, check_orders, device_orders
from lightning_gpp.schedules.lowering import lower
from lightning_gpp.schedules.passes import with_collectives, with_data, with_offload, with_recomputation
from lightning_gpp.schedules.program import Program
from lightning_gpp.schedules.verifier import collective_deadlock, verify

Generator = Callable[[Plan, int], Orders]
"""A function from a plan and the samples of a mini-batch to the orders of all stages, or of all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A schedule and its requirements on the plan.

    Args:
        generate: the generator.
        layout: "looped" (stage i on device i modulo the number of devices) or "zigzag" (back and forth); the
            same with one stage per device.
        stages_per_device: the number that it is made for, and the least with which it makes sense.
        bidirectional: whether every stage has a second replica, in a pipeline that runs the other way.
    """

    generate: Generator
    layout: str = "looped"
    stages_per_device: int = 1
    bidirectional: bool = False


SCHEDULES: Final[Registry[Method]] = Registry(
    setting="strategy.schedule", kind="schedule", decorator="register_schedule", error=ScheduleError
)


def register_schedule(
    name: str, *, layout: str = "looped", stages_per_device: int = 1, bidirectional: bool = False
) -> Callable[[Generator], Generator]:
    """Make a generator of orders available as `strategy.schedule=name`; the other arguments are those of `Method`.

    If a generator orders stages and a device holds several of them, a common pass interleaves them. Orders are those of
    training; inference runs their forwards.

    Raises:
        ScheduleError: the name is taken.
    """

    def method(generator: Generator) -> Method:
        return Method(
            generate=generator, layout=layout, stages_per_device=stages_per_device, bidirectional=bidirectional
        )

    return SCHEDULES.adding(name, method)


def schedule_names() -> tuple[str, ...]:
    """All names that `strategy.schedule` accepts."""
    return SCHEDULES.names()


def orders_of(plan: Plan, batch_size: int | None = None) -> Orders:
    """The checked orders of training under the plan's schedule.

    Raises:
        ScheduleError: the schedule is unknown, or it does not run every micro-batch once, forward before backward.
    """
    total = _checked(plan.batch_size if batch_size is None else batch_size)
    orders = method_of(plan.schedule).generate(plan, total)
    check_orders(plan, orders, total)
    return orders


def make_schedule(
    plan: Plan,
    batch_size: int | None = None,
    training: bool = True,
    *,
    replicated: Collection[int] = (),
    apart: bool = False,
) -> Schedule:
    """The order of every device under the plan's schedule, with all passes applied.

    Args:
        plan: the plan, which names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: whether there are backwards.
        replicated: stages that several ranks hold, over all pipeline replicas: they get collectives.
        apart: collectives of sharded parameters before and after all actions, see `with_collectives`.

    Raises:
        ScheduleError: the schedule is unknown, or its orders cannot run.
    """
    total = plan.batch_size if batch_size is None else batch_size
    orders = orders_of(plan, batch_size)
    schedule, started = device_orders(plan, orders if training else _forwards(orders), total, training)
    schedule = with_data(plan, schedule, started, total, training)
    schedule = with_offload(plan, with_recomputation(plan, schedule))
    return with_collectives(plan, schedule, replicated, training, apart=apart)


def compile_program(
    plan: Plan, batch_size: int | None = None, training: bool = True, *, copies: int = 1, reduce: bool = True
) -> Program:
    """Make a program: order, lower and verify.

    Args:
        plan: the plan, which names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: whether there are backwards.
        copies: number of pipeline replicas.
        reduce: whether gradients are reduced over ranks; False before the last of several accumulated mini-batches.

    Raises:
        ScheduleError: the schedule is unknown, cannot run, or exceeds the micro-batches in flight that it promised.
        PlanError: tensors would have to be cut that cannot be.
    """
    replicated = {i for i, stage in enumerate(plan.stages) if len(stage.devices) * copies > 1 and _reduces(stage)}
    for apart in (False, True):
        schedule = make_schedule(plan, batch_size, training, replicated=replicated, apart=apart)
        program = lower(plan, schedule if reduce else schedule.without(Kind.REDUCE), batch_size, training)
        if not collective_deadlock(program):
            break
    verify(program, flights(schedule.devices) if training else {})
    return program


def _reduces(stage: Stage) -> bool:
    """True if a stage reduces gradients. Of slices, which share parameters, the first does: its backward ends last."""
    return stage.tokens is None or not stage.tokens[0]


def _forwards(orders: Orders) -> Orders:
    def kept(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in actions if action.kind is Kind.FORWARD)

    if isinstance(orders, Schedule):
        return Schedule(tuple(map(kept, orders.devices)))
    return {stage: kept(order) for stage, order in orders.items()}


def in_flight(plan: Plan, batch_size: int | None = None) -> dict[int, int]:
    """The most micro-batches in flight on a replica of every stage under the plan's schedule."""
    return flights(make_schedule(plan, batch_size).devices)


def flights(rows: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The most micro-batches in flight on a replica of every stage: their forward ran, but not their backward.

    In inference, a micro-batch is in flight only during its forward. `rows`: the actions of every device.
    """
    most: dict[int, int] = {}
    trains = any(action.kind in RELEASES for actions in rows for action in actions)
    for actions in rows:
        now: Counter[int] = Counter()
        for action in actions:
            now[action.stage] += (action.kind is Kind.FORWARD) - (action.kind in RELEASES)
            number = now[action.stage] if trains else min(1, now[action.stage])
            most[action.stage] = max(most.get(action.stage, 0), number)
    return dict(sorted(most.items()))


def method_of(name: str) -> Method:
    """The schedule registered under a name.

    Raises:
        ScheduleError: there is none.
    """
    return SCHEDULES.get(name)


def _checked(batch_size: int) -> int:
    if batch_size < 1:
        raise ScheduleError(f"A mini-batch needs at least 1 sample per pipeline replica, got batch_size={batch_size}.")
    return batch_size
