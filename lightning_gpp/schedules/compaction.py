"""Compaction: closes the gaps of an order by list scheduling: actions move up if a device would idle.

An action may overtake others if it is ready and leaves enough memory for them, so the rest can always run in order and
nothing deadlocks. Weight gradients fill the remaining gaps, and free memory.

Source: the squeezing of Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362),
which moves actions of equal length to free cells of a chain's table. Here the durations are the plan's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Final

from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.list_scheduling import SLACK, Clock, DeviceOrders, TaskGraph, list_schedule
from lightning_gpp.schedules.work import Work

WINDOWS: Final = (0, 1, 2, 4)
"""Numbers of actions that an action may overtake. The best depends on the pipeline: wide windows fill more gaps at
first, and may leave larger ones later.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The order of every device, the longest time of a device from first start to last end, and the step time."""

    rows: DeviceOrders
    busy: float
    makespan: float


def fastest(work: Work, trials: Iterable[Compacted]) -> Compacted:
    """The trial whose slowest device finishes first, because the next mini-batch waits for it.

    Trials run one after the other until one has no gaps.
    """
    most = max(work.loads()) * SLACK
    tried: list[Compacted] = []
    for trial in trials:
        tried.append(trial)
        if trial.busy <= most:
            break
    return min(tried, key=lambda trial: (trial.busy, trial.makespan))


def compacted(work: Work, rows: DeviceOrders, limits: Sequence[float]) -> Iterator[Compacted]:
    """Compact an order in several ways.

    Args:
        work: the plan's work.
        rows: for every device its forwards and input gradients, in an order that cannot deadlock.
        limits: memory limit of every device; the order must fit.
    """
    patience = (False, True) if work.timed else (False,)
    return (compact(work, rows, limits, window, patient) for window, patient in product(WINDOWS, patience))


def compact(
    work: Work, rows: DeviceOrders, limits: Sequence[float], window: int = 0, patient: bool = False
) -> Compacted:
    """Compact an order.

    Args:
        work: the plan's work.
        rows: for every device its actions. Weight gradients that are listed keep their place.
        limits: memory limit of every device.
        window: number of actions that one may overtake.
        patient: whether a device idles until a message arrives if weight gradients would delay its reader.
    """
    clock = Clock(len(rows), work.tasks)
    list_schedule(clock, Compaction(clock, rows, limits, window, patient))
    busy = max(stop - start for start, stop in zip(clock.begins(), clock.free, strict=True) if start < inf)
    return Compacted(rows=clock.rows, busy=busy, makespan=max(clock.free))


@dataclass(slots=True)
class Compaction:
    """The policy of `compact`."""

    clock: Clock
    rows: DeviceOrders
    limits: Sequence[float]
    window: int
    patient: bool
    takes: Sequence[float] = field(init=False)
    rest: list[list[int]] = field(init=False)
    held: list[float] = field(init=False)
    freeable: list[float] = field(init=False)
    weights: list[deque[int]] = field(init=False)
    """Weight gradients of every device that are ready and not listed."""
    follows: dict[int, int] = field(init=False)
    """The weight gradients of each input gradients, unless they are listed."""
    unlisted: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        devices, tasks = range(len(self.rows)), self.clock.tasks
        self.takes = tasks.takes
        self.rest = [[tasks.numbers[device, action] for action in row] for device, row in enumerate(self.rows)]
        self.weights = [deque() for _ in devices]
        self.held, self.freeable = [0.0 for _ in devices], [0.0 for _ in devices]
        self.follows = _unlisted_weights(tasks, {task for row in self.rest for task in row})
        self.unlisted = frozenset(self.follows.values())

    def choose(self, device: int) -> int | None:
        place, weights = self._place(device), self.weights[device]
        if place is not None and not (weights and self._is_full(device, self.rest[device][place])):
            return self._started(device, self.rest[device].pop(place))
        if weights and (place is not None or not self.patient or self._has_time(device)):
            return self._started(device, weights.popleft())
        return None

    def force(self) -> int | None:
        """Never force a task: the given order fits the memory."""
        return None

    def _place(self, device: int) -> int | None:
        """Index of the first action that is ready and leaves enough memory for the actions it overtakes; None if there
        is none."""
        slack = least = self.limits[device] * SLACK - self.held[device] + self.freeable[device]
        for place, task in enumerate(self.rest[device][: self.window + 1]):
            kept = self._kept(task)
            if (place == 0 or kept <= least) and self.clock.is_ready(task):
                return place
            slack -= kept
            least = min(least, slack)
        return None

    def _kept(self, task: int) -> float:
        """Bytes that a task allocates, including unlisted weight gradients that follow it."""
        weight = self.follows.get(task)
        return self.takes[task] if weight is None else self.takes[task] + self.takes[weight]

    def _is_full(self, device: int, task: int) -> bool:
        return self.held[device] + self._kept(task) > self.limits[device] * SLACK

    def _has_time(self, device: int) -> bool:
        """True if the next weight gradients end before anything else is known to arrive."""
        now = self.clock.time
        end = now + self.clock.tasks.seconds[self.weights[device][0]]
        expected = (self.clock.arrival[task] for task in self.rest[device][: self.window + 1])
        return all(not now < arrival < end for arrival in expected)

    def _started(self, device: int, task: int) -> int:
        self.held[device] += self.takes[task]
        weight = self.follows.get(task)
        if weight is not None:
            self.weights[device].append(weight)
            self.freeable[device] -= self.takes[weight]
        elif task in self.unlisted:
            self.freeable[device] += self.takes[task]
        return task


def _unlisted_weights(tasks: TaskGraph, listed: set[int]) -> dict[int, int]:
    pairs = (
        (number, tasks.numbers[device, action.of_kind(Kind.WEIGHT)])
        for (device, action), number in tasks.numbers.items()
        if action.kind is Kind.INPUT
    )
    return {first: second for first, second in pairs if second not in listed}
