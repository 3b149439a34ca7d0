"""Orders for pipelines that run through the same devices in several directions.

Each stage has replicas that take whole micro-batches in turn (`round_robin`), each in a pipeline of its own: where one
pipeline waits for its warm-up, the devices work for the other. Both published orders are made for slots of equal
length. Backwards take longer than forwards, and messages take time; an order that knows it leaves fewer gaps with many
micro-batches and room for them, and may leave more with few, or in little room. So several clocks are played, at
several paces, and the order that ends first by the real seconds is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.merge import Task
from lightning_gpp.schedules.one_f_one_b import in_flight_samples
from lightning_gpp.schedules.paced import Load, Pace, computing, dependencies, paced

PACES: Final = (Pace(0.5, 2.0), Pace(0.25, 2.0), Pace(0.5, 3.0))
"""The first leaves the smallest bubbles where there is room for half as many micro-batches again as pipelines are deep;
the others do with less room. Found by a search over both numbers for 4 to 16 devices."""


def bidirectional_order(plan: Plan, batch_size: int) -> Schedule:
    """The order that ends first, of those with the room that devices have.

    Room is that of `plan.memory_bytes`. Where it is not known, a device keeps as many micro-batches in flight, of all
    its stages together, as the stage graph is deep: the peak of the published orders.
    """
    seconds = seconds_of(plan, batch_size)
    kept, room = _room(plan, batch_size)
    missing, readers = dependencies(plan, batch_size)
    load = Load(seconds=seconds, kept=kept, room=room, missing=missing, readers=readers)
    orders = [paced(plan, batch_size, each, pace) for each in _simpler(load) for pace in PACES]
    return min(orders, key=lambda order: makespan(order, load))


def _simpler(load: Load) -> list[Load]:
    """The load itself, the same with messages that take no time, and with slots of equal length."""
    at_once = {task: [(reader, 0.0) for reader, _ in readers] for task, readers in load.readers.items()}
    timeless = replace(load, readers=at_once)
    slots = replace(timeless, seconds=_equal(load.seconds))
    return [timeless, slots] if at_once == load.readers else [load, timeless, slots]


def seconds_of(plan: Plan, batch_size: int) -> dict[Task, float]:
    """Of every forward and backward; where the plan does not know, a sample takes 1 forward and 2 backward."""
    tasks = computing(plan, batch_size)
    known = {task: _known(plan, task[1], samples) for task, samples in tasks.items()}
    if any(known.values()):
        return known
    return {task: samples * (1.0 if task[1].kind is Kind.FORWARD else 2.0) for task, samples in tasks.items()}


def _known(plan: Plan, action: Action, samples: int) -> float:
    figures = plan.stages[action.stage].figures
    if not samples:
        return 0.0
    forward = figures.forward_seconds.at(samples)
    if action.kind is Kind.FORWARD:
        return forward
    again = forward if plan.stages[action.stage].recompute else 0.0
    return again + figures.input_seconds.at(samples) + figures.weight_seconds.at(samples)


def _equal(seconds: Mapping[Task, float]) -> dict[Task, float]:
    """Forward and backward of a micro-batch take the same."""

    def both(device: int, action: Action) -> float:
        return sum(seconds[device, action._replace(kind=kind)] for kind in (Kind.FORWARD, Kind.BACKWARD))

    return {task: both(*task) / 2 for task in seconds}


def _room(plan: Plan, batch_size: int) -> tuple[dict[Task, float], tuple[float, ...]]:
    """What forwards keep, and the room of devices: both in bytes where these are known, otherwise in samples."""
    forwards = {task: n for task, n in computing(plan, batch_size).items() if task[1].kind is Kind.FORWARD}
    if plan.memory_bytes:
        figures = [stage.figures for stage in plan.stages]
        kept = {task: figures[task[1].stage].activation_bytes.at(n) if n else 0.0 for task, n in forwards.items()}
        return kept, plan.memory_bytes
    deep = max(in_flight_samples(plan).values())
    sizes = [stage.micro_batch_size for stage in plan.stages]
    one_each = [sum(sizes[stage] for stage in plan.stages_on(device)) for device in range(plan.num_devices)]
    return {task: float(n) for task, n in forwards.items()}, tuple(float(max(deep, size)) for size in one_each)


def makespan(order: Schedule, load: Load) -> float:
    """Seconds from the first start to the last end if every device keeps to its order."""
    missing, arrived = dict(load.missing), dict.fromkeys(load.seconds, 0.0)
    free, position = [0.0 for _ in order.devices], [0 for _ in order.devices]
    ready = list(range(len(order.devices)))
    while ready:
        device = ready.pop()
        actions = order.devices[device]
        while position[device] < len(actions) and not missing.get((device, actions[position[device]])):
            task = device, actions[position[device]]
            free[device] = max(free[device], arrived[task]) + load.seconds[task]
            position[device] += 1
            for reader, seconds in load.readers.get(task, ()):
                missing[reader] -= 1
                arrived[reader] = max(arrived[reader], free[device] + seconds)
                ready.append(reader[0])
    return max(free)
