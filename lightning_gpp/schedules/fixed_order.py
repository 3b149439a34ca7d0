"""Runs a fixed order of a task graph: start times, step time and the critical path."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.schedules.list_scheduling import DeviceOrders, TaskGraph

NOTHING: Final = -1
"""Represents no task."""

NumberRows = Sequence[Sequence[int]]
"""The numbers of every device's tasks, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOrder:
    """An order and its times.

    Args:
        tasks: the task graph.
        order: the numbers of every device's tasks.
        start: start of every task, in seconds.
        missing: number of every task's inputs, and predecessors on its device, that never ran.
        makespan: end of the last task, in seconds.
        last: number of the task that ends last; `NOTHING` without tasks.
        cause: the task whose end decided the start of each task; `NOTHING` if it started at once.
    """

    tasks: TaskGraph
    order: NumberRows
    start: Sequence[float]
    missing: Sequence[int]
    makespan: float
    last: int
    cause: Sequence[int]

    @property
    def rows(self) -> DeviceOrders:
        """The actions of every device."""
        return [[self.tasks.actions[task] for task in row] for row in self.order]

    @property
    def deadlocks(self) -> bool:
        """True if tasks wait for each other in a cycle."""
        return any(self.missing)

    @property
    def busy(self) -> float:
        """The longest time of a device from its first start to its last end, in seconds."""
        ends = ((row[0], row[-1]) for row in self.order if row)
        return max(self.start[last] + self.tasks.seconds[last] - self.start[first] for first, last in ends)

    def critical_path(self) -> Iterator[int]:
        """The tasks that decide the step time, from the last one back."""
        task = self.last
        while task != NOTHING:
            yield task
            task = self.cause[task]


def in_order(tasks: TaskGraph, rows: DeviceOrders) -> FixedOrder:
    """Run every device's actions in their order."""
    return run_order(tasks, [[tasks.numbers[device, action] for action in row] for device, row in enumerate(rows)])


def run_order(tasks: TaskGraph, order: NumberRows) -> FixedOrder:
    """Run tasks by their numbers."""
    follower, missing = [NOTHING for _ in tasks.missing], list(tasks.missing)
    for row in order:
        for task, following in zip(row, row[1:], strict=False):
            follower[task] = following
            missing[following] += 1
    start, cause = [0.0 for _ in missing], [NOTHING for _ in missing]
    ready = deque(task for row in order for task in row if not missing[task])
    makespan, last = 0.0, NOTHING
    while ready:
        task = ready.popleft()
        end = start[task] + tasks.seconds[task]
        if end > makespan or last == NOTHING:
            makespan, last = end, task
        readers = tasks.readers[task]
        if follower[task] != NOTHING:
            readers = [(follower[task], 0.0), *readers]
        for reader, travel in readers:
            if end + travel > start[reader] or cause[reader] == NOTHING:
                start[reader], cause[reader] = end + travel, task
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return FixedOrder(tasks=tasks, order=order, start=start, missing=missing, makespan=makespan, last=last, cause=cause)
