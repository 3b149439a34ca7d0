"""Closes the gaps of an order: devices are played on a clock, and take actions out of turn where they would wait.

A device may do something before its turn if it can run now, and if what it has passed over still fits into the memory
afterwards, so that the rest can always be run in its order. Hence nothing waits in a circle. Gradients of parameters
fill what gaps are left, and make room.

Source: the squeezing of Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362),
which moves actions of equal length to free cells of a chain's table. This clock takes the plan's own times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Final

from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.clock import Clock
from lightning_gpp.schedules.memory import SLACK
from lightning_gpp.schedules.tasks import Rows
from lightning_gpp.schedules.work import Work

WINDOWS: Final = (0, 1, 2, 4)
"""By how many places actions may come before their turn. Which is best depends on the pipeline: far-sighted moves fill
more gaps now, and may leave larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeezed:
    """What devices do; the longest time from the first start to the last stop of a device, and of all."""

    rows: Rows
    busy: float
    makespan: float


def fastest(work: Work, runs: Iterable[Squeezed]) -> Squeezed:
    """The run whose slowest device is done soonest, as decides how soon the next mini-batch can follow.

    Runs are made one after the other until one has no gaps.
    """
    most = max(work.loads()) * SLACK
    tried: list[Squeezed] = []
    for run in runs:
        tried.append(run)
        if run.busy <= most:
            break
    return min(tried, key=lambda run: (run.busy, run.makespan))


def squeezed(work: Work, rows: Rows, room: Sequence[float]) -> Iterator[Squeezed]:
    """Several ways to close the gaps of an order.

    Args:
        work: of the plan.
        rows: for every device its forwards and gradients of inputs, in an order without circles.
        room: bytes of every device; in them the order must fit.
    """
    patience = (False, True) if work.timed else (False,)
    return (play(work, rows, room, window, patient) for window, patient in product(WINDOWS, patience))


def play(work: Work, rows: Rows, room: Sequence[float], window: int = 0, patient: bool = False) -> Squeezed:
    """Run an order on the clock.

    Args:
        work: of the plan.
        rows: for every device its actions. Gradients of parameters that are listed keep their place.
        room: bytes of every device.
        window: by how many places an action may come before its turn.
        patient: rather wait for a message than delay what it brings by gradients of parameters.
    """
    run = _Run(work, rows, room, window, patient)
    run.play()
    free = run.clock.free
    busy = max(stop - start for start, stop in zip(run.begun, free, strict=True) if start < inf)
    return Squeezed(rows=run.clock.rows, busy=busy, makespan=max(free))


@dataclass(slots=True)
class _Run:
    work: Work
    rows: Rows
    room: Sequence[float]
    window: int
    patient: bool
    clock: Clock = field(init=False)
    takes: list[float] = field(init=False)
    """Bytes of every task, by number."""
    rest: list[list[int]] = field(init=False)
    begun: list[float] = field(init=False)
    held: list[float] = field(init=False)
    freeable: list[float] = field(init=False)
    weights: list[deque[int]] = field(init=False)
    follows: dict[int, int] = field(init=False)
    """The gradients of parameters that those of inputs leave to do, where they are not listed."""
    unlisted: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        devices, numbers = range(len(self.rows)), self.work.tasks.numbers
        self.clock = Clock(len(self.rows), self.work.tasks)
        self.takes = [self.work.takes[task] for task in numbers]
        self.rest = [[numbers[device, action] for action in row] for device, row in enumerate(self.rows)]
        self.weights = [deque() for _ in devices]
        self.begun = [inf for _ in devices]
        self.held, self.freeable = [0.0 for _ in devices], [0.0 for _ in devices]
        self.follows = self._pairs()
        self.unlisted = frozenset(self.follows.values())

    def _pairs(self) -> dict[int, int]:
        numbers, listed = self.work.tasks.numbers, {task for row in self.rest for task in row}
        pairs = (
            (number, numbers[device, action._replace(kind=Kind.WEIGHT)])
            for (device, action), number in numbers.items()
            if action.kind is Kind.INPUT
        )
        return {first: second for first, second in pairs if second not in listed}

    def play(self) -> None:
        for device in self.clock.turns():
            found, weights = self._choice(device), self.weights[device]
            if found is not None and not (weights and self._is_full(device, self.rest[device][found])):
                self._start(device, self.rest[device].pop(found))
            elif weights and (found is not None or not self.patient or self._has_time(device)):
                self._start(device, weights.popleft())

    def _choice(self, device: int) -> int | None:
        """The place of the first action that can run, and after which those that it passes still fit."""
        slack = least = self.room[device] * SLACK - self.held[device] + self.freeable[device]
        for place, task in enumerate(self.rest[device][: self.window + 1]):
            kept = self._kept(task)
            if (place == 0 or kept <= least) and self.clock.is_ready(task):
                return place
            slack -= kept
            least = min(least, slack)
        return None

    def _kept(self, task: int) -> float:
        """Bytes that an action takes, or gives back; gradients of parameters that are not listed count with others."""
        weight = self.follows.get(task)
        return self.takes[task] if weight is None else self.takes[task] + self.takes[weight]

    def _is_full(self, device: int, task: int) -> bool:
        return self.held[device] + self._kept(task) > self.room[device] * SLACK

    def _has_time(self, device: int) -> bool:
        """Whether the next gradients of parameters are done before anything else is known to arrive."""
        now = self.clock.time
        end = now + self.work.tasks.seconds[self.weights[device][0]]
        expected = (self.clock.arrival[task] for task in self.rest[device][: self.window + 1])
        return all(not now < arrival < end for arrival in expected)

    def _start(self, device: int, task: int) -> None:
        self.begun[device] = min(self.begun[device], self.clock.time)
        self.clock.start(task)
        self.held[device] += self.takes[task]
        weight = self.follows.get(task)
        if weight is not None:
            self.weights[device].append(weight)
            self.freeable[device] -= self.takes[weight]
        elif task in self.unlisted:
            self.freeable[device] += self.takes[task]
