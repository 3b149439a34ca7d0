"""Orders for pipelines that run through the same devices in several directions.

Each stage has replicas that take whole micro-batches in turn (`round_robin`), each in a pipeline of its own: where one
pipeline waits for its warm-up, the devices work for the other. Both published orders are made for slots of equal
length. Backwards take longer than forwards, and messages take time; an order that knows it leaves fewer gaps with many
micro-batches and room for them, and may leave more with few, or in little room. So several clocks are played, at
several paces, and the order that ends first by the real seconds is taken.
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
from lightning_gpp.schedules.warm_up import in_flight_samples
from lightning_gpp.schedules.work import Work, links, work_of

PACES: Final = (Pace(0.5, 2.0), Pace(0.25, 2.0), Pace(0.5, 3.0))
"""The first leaves the smallest bubbles where there is room for half as many micro-batches again as pipelines are deep;
the others do with less room. Found by a search over both numbers for 4 to 16 devices."""

ROOMS: Final = 3
"""That are tried for a graph whose memory is not known: its own, its chain's and half-way. Five gain no more."""


def bidirectional_order(plan: Plan, batch_size: int) -> Schedule:
    """The order that ends first, of those with the room that devices have; of equal ones that in the least room.

    Room is that of `plan.memory_bytes`. Where it is not known, a device of a chain keeps as much, of all its stages
    together, as the deepest stage keeps under 1F1B with all micro-batches on one device: the peak of the published
    orders. A graph of as many stages is flatter, and may keep as much as their chain; often less is enough.

    The chain's own order is among those that are tried: it serves the graph too, which so is never slower.
    """
    work, chain = _work(plan, batch_size), plan.chained()
    trials = _with_room(work) if chain == plan else _beside(work, _work(chain, batch_size))
    orders = [order for trial in trials if not (order := in_order(work.tasks, by_due_date(*trial))).deadlocks]
    least = min(order.makespan for order in orders) * SLACK
    best = next(order for order in orders if order.makespan <= least)
    return Schedule(tuple(map(tuple, best.rows)))


def _work(plan: Plan, batch_size: int) -> Work:
    """Backwards whole; messages count in units of actions, too."""
    work = work_of(plan, batch_size, split=False)
    return work if work.timed else replace(work, readers=links(plan, batch_size, work.seconds)[1])


_Trial = tuple[Work, Sequence[float], Mapping[Action, float]]
"""What is played, in which room, and when it is due."""


def _with_room(work: Work) -> Iterator[_Trial]:
    room = work.limits or _room(work)
    return ((each, room, due_dates(each, pace)) for each in _simpler(work) for pace in PACES)


def _beside(work: Work, chain: Work) -> Iterator[_Trial]:
    """A graph in more and more room, and the chain of its stages in the same as the last."""
    least, most = (each.limits or _room(each) for each in (work, chain))
    trials = list(_with_room(work))
    for step in range(1 if most == least else ROOMS):
        room = [low + step / (ROOMS - 1) * (high - low) for low, high in zip(least, most, strict=True)]
        yield from ((each, room, due) for each, _, due in trials)
    yield from _with_room(chain)


def _simpler(work: Work) -> list[Work]:
    """The work itself, the same with messages that take no time, and with slots of equal length."""
    at_once = {task: [(reader, 0.0) for reader, _ in readers] for task, readers in work.readers.items()}
    timeless = replace(work, readers=at_once)
    slots = replace(timeless, seconds={task: _equal(work, *task) for task in work.seconds})
    return [timeless, slots] if at_once == work.readers else [work, timeless, slots]


def _equal(work: Work, device: int, action: Action) -> float:
    """Forward and backward of a micro-batch take the same."""
    return sum(work.seconds[device, action._replace(kind=kind)] for kind in (Kind.FORWARD, Kind.BACKWARD)) / 2


def _room(work: Work) -> list[float]:
    plan = work.plan
    one = [[0.0 for _ in plan.stages] for _ in range(plan.num_devices)]
    for (device, action), taken in work.takes.items():
        one[device][action.stage] = max(one[device][action.stage], taken)
    flying = [samples / plan.stages[stage].micro_batch_size for stage, samples in in_flight_samples(plan).items()]
    most = max(size * count for row in one for size, count in zip(row, flying, strict=True))
    return [max(most, sum(row)) for row in one]
