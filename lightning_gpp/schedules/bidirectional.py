"""Orders for pipelines that run through the same devices in opposite directions.

Each stage has replicas that take micro-batches in turn (`round_robin`), each in a pipeline of its own: while one
pipeline warms up, the devices work for the other. Both published orders are made for slots of equal length. But
backwards take longer than forwards, and messages take time. An order that accounts for this leaves fewer gaps with many
micro-batches and enough memory, and may leave more with few, or with little memory. So list scheduling runs with
several durations and paces, and the order with the shortest step by the real seconds is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.due_dates import Pace, by_due_date, due_dates
from lightning_gpp.schedules.fixed_order import in_order
from lightning_gpp.schedules.list_scheduling import SLACK
from lightning_gpp.schedules.one_f_one_b import in_flight_samples
from lightning_gpp.schedules.work import Work, links, work_of

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
    work = work_of(plan, batch_size, split=False)
    return work if work.timed else replace(work, readers=links(plan, batch_size, work.seconds)[1])


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
    at_once = {task: [(reader, 0.0) for reader, _ in readers] for task, readers in work.readers.items()}
    immediate = replace(work, readers=at_once)
    slots = replace(immediate, seconds={task: _equal(work, *task) for task in work.seconds})
    return [immediate, slots] if at_once == work.readers else [work, immediate, slots]


def _equal(work: Work, device: int, action: Action) -> float:
    """Mean duration of the forward and the backward of a micro-batch."""
    return sum(work.seconds[device, action.of_kind(kind)] for kind in (Kind.FORWARD, Kind.BACKWARD)) / 2


def _limits(work: Work) -> list[float]:
    """Memory limits of a chain whose plan has none."""
    plan = work.plan
    one = [[0.0 for _ in plan.stages] for _ in range(plan.num_devices)]
    for (device, action), taken in work.takes.items():
        one[device][action.stage] = max(one[device][action.stage], taken)
    flying = [samples / plan.stages[stage].micro_batch_size for stage, samples in in_flight_samples(plan).items()]
    most = max(size * count for row in one for size, count in zip(row, flying, strict=True))
    return [max(most, sum(row)) for row in one]
