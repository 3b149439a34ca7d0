"""Local search over orders: swaps neighbours on the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.schedules.fixed_order import NOTHING, FixedOrder, NumberRows, run_order
from lightning_gpp.schedules.list_scheduling import SLACK, TaskGraph
from lightning_gpp.schedules.work import peak


def improved(order: FixedOrder, limits: Sequence[float], tries: int) -> FixedOrder:
    """The shortest order that swaps lead to; none lengthens the step or exceeds the memory limit of its device.

    A swap that changes nothing may enable one that does; no order is visited twice.

    Args:
        order: the order to start from.
        limits: memory limit of every device.
        tries: maximum number of orders to run.
    """
    known = {_key(order.order)}
    better: FixedOrder | None = order
    while better is not None:
        order, better = better, None
        for rows in _swapped(order, limits):
            key = _key(rows)
            if key in known:
                continue
            if not tries:
                return order
            tries -= 1
            known.add(key)
            other = run_order(order.tasks, rows)
            if not other.deadlocks and other.makespan <= order.makespan * SLACK:
                better = other
                break
    return order


def _key(order: NumberRows) -> int:
    return hash(tuple(map(tuple, order)))


def _swapped(order: FixedOrder, limits: Sequence[float]) -> Iterator[NumberRows]:
    """Orders with two neighbours on the critical path swapped."""
    actions, rows = order.tasks.actions, order.order
    for device, index in _neighbours(order):
        row = list(rows[device])
        first, second = actions[row[index]], actions[row[index + 1]]
        if (first.stage, first.micro_batch) == (second.stage, second.micro_batch):
            continue
        row[index], row[index + 1] = row[index + 1], row[index]
        if _peak(order.tasks, row) <= max(limits[device], _peak(order.tasks, rows[device])):
            yield [*rows[:device], row, *rows[device + 1 :]]


def _peak(tasks: TaskGraph, row: Sequence[int]) -> float:
    return peak(tasks.takes[task] for task in row)


def _neighbours(order: FixedOrder) -> Iterator[tuple[int, int]]:
    """Device, and index of the first task, of neighbours on the critical path."""
    devices = order.tasks.devices
    place = {task: index for row in order.order for index, task in enumerate(row)}
    for task in order.critical_path():
        before = order.cause[task]
        if before != NOTHING and devices[before] == devices[task] and place[before] + 1 == place[task]:
            yield devices[task], place[before]
