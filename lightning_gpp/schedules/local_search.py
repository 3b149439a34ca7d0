"""Improves an order: swaps neighbours on the path that decides how long the step takes, as long as that helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from lightning_gpp.schedules.memory import SLACK
from lightning_gpp.schedules.tasks import Numbered, Rows
from lightning_gpp.schedules.work import Work

_NOTHING: Final = -1
"""In place of a task's number."""

_NumberRows = Sequence[Sequence[int]]
"""For every device the numbers of its tasks, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An order, and how long it takes.

    Args:
        tasks: that it orders.
        order: for every device their numbers.
        makespan: when all are done, in seconds.
        last: the number of the one that is done last; `_NOTHING` where there is none.
        cause: for every task whose end decided when it started; `_NOTHING` if it started at once.
    """

    tasks: Numbered
    order: _NumberRows
    makespan: float
    last: int
    cause: Sequence[int]

    @property
    def rows(self) -> Rows:
        """For every device its actions."""
        return [[self.tasks.actions[task] for task in row] for row in self.order]


def played(work: Work, rows: Rows) -> Played | None:
    """When the actions of an order start and end; None if they wait for each other in a circle."""
    numbers = work.tasks.numbers
    return _play(work.tasks, [[numbers[device, action] for action in row] for device, row in enumerate(rows)])


def _play(tasks: Numbered, order: _NumberRows) -> Played | None:
    follower, missing = [_NOTHING for _ in tasks.missing], list(tasks.missing)
    for row in order:
        for task, following in zip(row, row[1:], strict=False):
            follower[task] = following
            missing[following] += 1
    start, cause = [0.0 for _ in missing], [_NOTHING for _ in missing]
    ready = deque(task for row in order for task in row if not missing[task])
    makespan, last, done = 0.0, _NOTHING, 0
    while ready:
        task = ready.popleft()
        done += 1
        end = start[task] + tasks.seconds[task]
        if end > makespan or last == _NOTHING:
            makespan, last = end, task
        readers = tasks.readers[task]
        if follower[task] != _NOTHING:
            readers = [(follower[task], 0.0), *readers]
        for reader, travel in readers:
            if end + travel > start[reader] or cause[reader] == _NOTHING:
                start[reader], cause[reader] = end + travel, task
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    if done < len(missing):
        return None
    return Played(tasks=tasks, order=order, makespan=makespan, last=last, cause=cause)


def improved(work: Work, order: Played, room: Sequence[float], tries: int) -> Played:
    """The shortest order that swaps lead to, none of which makes the step longer or exceeds the room of its device.

    A swap that changes nothing may open the way for one that does; no order is visited twice.

    Args:
        work: of the plan.
        order: to begin with.
        room: of every device.
        tries: orders that are played at most.
    """
    takes = [work.takes[task] for task in work.tasks.numbers]
    known = {_key(order.order)}
    found: Played | None = order
    while found is not None:
        order, found = found, None
        for rows in _swapped(order, takes, room):
            key = _key(rows)
            if key in known:
                continue
            if not tries:
                return order
            tries -= 1
            known.add(key)
            other = _play(work.tasks, rows)
            if other is not None and other.makespan <= order.makespan * SLACK:
                found = other
                break
    return order


def _key(order: _NumberRows) -> int:
    return hash(tuple(map(tuple, order)))


def _swapped(order: Played, takes: Sequence[float], room: Sequence[float]) -> Iterator[_NumberRows]:
    """Orders with two neighbours on the longest path in each other's place."""
    actions, rows = order.tasks.actions, order.order
    for device, index in _neighbours(order):
        row = list(rows[device])
        first, second = actions[row[index]], actions[row[index + 1]]
        if (first.stage, first.micro_batch) == (second.stage, second.micro_batch):
            continue
        row[index], row[index + 1] = row[index + 1], row[index]
        if _peak(takes, row) <= max(room[device], _peak(takes, rows[device])):
            yield [*rows[:device], row, *rows[device + 1 :]]


def _peak(takes: Sequence[float], row: Sequence[int]) -> float:
    return max(accumulate((takes[task] for task in row), initial=0.0))


def _neighbours(order: Played) -> Iterator[tuple[int, int]]:
    """Pairs on one device, by device and place of the first, of which the second waited for nothing but the first."""
    devices = order.tasks.devices
    place = {task: index for row in order.order for index, task in enumerate(row)}
    task = order.last
    while task != _NOTHING:
        before = order.cause[task]
        if before != _NOTHING and devices[before] == devices[task] and place[before] + 1 == place[task]:
            yield devices[task], place[before]
        task = before
