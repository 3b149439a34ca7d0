"""Orders for pipelines that run through the same devices in opposite directions.

Each stage has replicas that take micro-batches in turn (`round_robin`), each in a pipeline of its own: while one
pipeline warms up, the devices work for the other. Both published orders are made for slots of equal length. But
backwards take longer than forwards, and messages take time. An order that accounts for this leaves fewer gaps with many
micro-batches and enough memory, and may leave more with few, or with little memory. So list scheduling runs with
several durations and paces, and the order with the shortest step by the real seconds is taken.

Of the ready tasks, a device starts the one that is due first. Due dates are those of a steady pipeline: micro-batches
enter at the pace of the busiest device, all pipelines at once, and a forward (backward) is due `Pace.forward`
(`Pace.backward`) cycles after that of the neighbouring stage; a cycle is the mean time of a stage per micro-batch. A
forward also waits until its device has memory for it. If all devices wait for memory, the task that is due first starts
beyond the limit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.list_scheduling import (
    SLACK,
    Clock,
    DeviceOrders,
    Priorities,
    TaskGraph,
    in_order,
    list_schedule,
)
from lightning_gpp.schedules.one_f_one_b import in_flight_samples
from lightning_gpp.schedules.work import Work, turns, work_of


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
    for action in work.tasks.actions:
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


PACES: Final = (Pace(0.5, 2.0), Pace(0.25, 2.0), Pace(0.5, 3.0))
"""The first leaves the smallest bubbles if a device has memory for 3/2 as many micro-batches as the pipelines are deep,
the others with less. Result of a search over both numbers for 4 to 16 devices."""

NUM_LIMITS: Final = 3
"""Memory limits to try for a graph if the plan has none: its need, its chain's and half-way. Five gain nothing."""


def bidirectional_order(plan: Plan, batch_size: int) -> Schedule:
    """The shortest order that fits the devices' memory; ties go to the one that needs least.

    The limits are `plan.memory_bytes`. If they are unknown, a device of a chain may hold, of all its stages together,
    as much as the deepest stage holds under 1F1B with all micro-batches on one device: the peak of the published
    orders. A graph with as many stages has less depth and may hold as much as their chain; often less is enough.

    The chain's own order is tried for the graph, too, so a graph is never slower than its chain.
    """
    work, chain = _work(plan, batch_size), plan.chained()
    trials = _trials(work) if chain == plan else _beside(work, _work(chain, batch_size))
    orders = [order for trial in trials if not (order := in_order(work.tasks, by_due_date(*trial))).deadlocks]
    least = min(order.makespan for order in orders) * SLACK
    best = next(order for order in orders if order.makespan <= least)
    return Schedule(tuple(map(tuple, best.rows)))


def _work(plan: Plan, batch_size: int) -> Work:
    """The work with full backwards. If the plan has no times, messages take their seconds as units, too."""
    return work_of(plan, batch_size, split=False, travels=True)


_ListRun = tuple[Work, Sequence[float], Mapping[Action, float]]
"""Work, memory limits and due dates for one run of list scheduling."""


def _trials(work: Work) -> Iterator[_ListRun]:
    limits = work.limits or _limits(work)
    return ((each, limits, due_dates(each, pace)) for each in _simpler(work) for pace in PACES)


def _beside(work: Work, chain: Work) -> Iterator[_ListRun]:
    """A graph with rising limits, then the chain of its stages with the highest."""
    least, most = (each.limits or _limits(each) for each in (work, chain))
    trials = list(_trials(work))
    for step in range(1 if most == least else NUM_LIMITS):
        limits = [low + step / (NUM_LIMITS - 1) * (high - low) for low, high in zip(least, most, strict=True)]
        yield from ((each, limits, due) for each, _, due in trials)
    yield from _trials(chain)


def _simpler(work: Work) -> list[Work]:
    """The work itself, without message times, and with equal durations of forward and backward."""
    at_once = [[(reader, 0.0) for reader, _ in readers] for readers in work.tasks.readers]
    immediate = replace(work.tasks, readers=at_once)
    slots = replace(immediate, seconds=[_equal(work.tasks, *task) for task in work.tasks.numbers])
    simpler = [replace(work, tasks=immediate), replace(work, tasks=slots)]
    return simpler if at_once == work.tasks.readers else [work, *simpler]


def _equal(tasks: TaskGraph, device: int, action: Action) -> float:
    """Mean duration of the forward and the backward of a micro-batch."""
    both = (tasks.numbers[device, action.of_kind(kind)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    return sum(tasks.seconds[number] for number in both) / 2


def _limits(work: Work) -> list[float]:
    """Memory limits of a chain whose plan has none."""
    plan = work.plan
    one = [[0.0 for _ in plan.stages] for _ in range(plan.num_devices)]
    for (device, action), taken in zip(work.tasks.numbers, work.tasks.takes, strict=True):
        one[device][action.stage] = max(one[device][action.stage], taken)
    flying = [samples / plan.stages[stage].micro_batch_size for stage, samples in in_flight_samples(plan).items()]
    most = max(size * count for row in one for size, count in zip(row, flying, strict=True))
    return [max(most, sum(row)) for row in one]
