"""Improves an order: swaps neighbours on the path that decides how long the step takes, as long as that helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.schedules.room import SLACK, peak_of
from lightning_gpp.schedules.work import Rows, Task, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An order of split backwards, and when everything starts and ends.

    `cause[task]`: whose end decided when it started; None if it started at once.
    """

    rows: Rows
    stop: dict[Task, float]
    cause: dict[Task, Task | None]

    @property
    def makespan(self) -> float:
        return max(self.stop.values(), default=0.0)


def played(work: Work, rows: Rows) -> Played | None:
    """When the actions of an order start and end; None if they wait for each other in a circle."""
    missing = {task: work.missing[task] + (index > 0) for task, index in _tasks(rows)}
    start: dict[Task, float] = {}
    stop: dict[Task, float] = {}
    cause: dict[Task, Task | None] = {}
    after = {(d, row[i]): (d, row[i + 1]) for d, row in enumerate(rows) for i in range(len(row) - 1)}
    ready = deque(task for task, count in missing.items() if not count)
    while ready:
        task = ready.popleft()
        end = stop[task] = start.get(task, 0.0) + work.seconds[task]
        cause.setdefault(task, None)
        followers = [(after[task], 0.0)] if task in after else []
        for reader, travel in (*followers, *work.readers[task]):
            if end + travel > start.get(reader, -1.0):
                start[reader], cause[reader] = end + travel, task
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return Played(rows=rows, stop=stop, cause=cause) if len(stop) == len(missing) else None


def _tasks(rows: Rows) -> Iterator[tuple[Task, int]]:
    return (((device, action), index) for device, row in enumerate(rows) for index, action in enumerate(row))


def improved(work: Work, order: Played, room: Sequence[float], tries: int) -> Played:
    """The shortest order that swaps lead to, none of which makes the step longer or exceeds the room of its device.

    A swap that changes nothing may open the way for one that does; no order is visited twice.

    Args:
        work: of the plan.
        order: to begin with.
        room: of every device.
        tries: orders that are played at most.
    """
    known = {_key(order.rows)}
    found: Played | None = order
    while found is not None:
        order, found = found, None
        for rows in _swapped(work, order, room):
            key = _key(rows)
            if key in known:
                continue
            if not tries:
                return order
            tries -= 1
            known.add(key)
            other = played(work, rows)
            if other is not None and other.makespan <= order.makespan * SLACK:
                found = other
                break
    return order


def _key(rows: Rows) -> int:
    return hash(tuple(map(tuple, rows)))


def _swapped(work: Work, order: Played, room: Sequence[float]) -> Iterator[Rows]:
    """Orders with two neighbours on the longest path in each other's place."""
    for device, index in _neighbours(order):
        row = list(order.rows[device])
        first, second = row[index], row[index + 1]
        if (first.stage, first.micro_batch) == (second.stage, second.micro_batch):
            continue
        row[index : index + 2] = second, first
        if peak_of(work, device, row) <= max(room[device], peak_of(work, device, order.rows[device])):
            yield [*order.rows[:device], row, *order.rows[device + 1 :]]


def _neighbours(order: Played) -> Iterator[tuple[int, int]]:
    """Pairs on one device, by device and place of the first, of which the second waited for nothing but the first."""
    place = dict(_tasks(order.rows))
    task: Task | None = max(order.stop, key=lambda entry: order.stop[entry], default=None)
    while task is not None:
        before = order.cause[task]
        if before is not None and before[0] == task[0] and place[before] + 1 == place[task]:
            yield task[0], place[before]
        task = before
