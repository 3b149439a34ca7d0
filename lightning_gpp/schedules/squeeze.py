"""Closes the gaps of an order: devices are played on a clock, and take actions out of turn where they would wait.

A device may do something before its turn if it can run now, and if what it has passed over still fits into the memory
afterwards, so that the rest can always be run in its order. Hence nothing waits in a circle. Gradients of parameters
fill what gaps are left, and make room.

Source: the squeezing of Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362),
which moves actions of equal length to free cells of a chain's table. This clock takes the plan's own times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Final

from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.merge import Task
from lightning_gpp.schedules.split_work import Rows, SplitWork

WINDOWS: Final = (0, 1, 2, 4)
"""By how many places actions may come before their turn. Which is best depends on the pipeline: far-sighted moves fill
more gaps now, and may leave larger ones."""

_SLACK: Final = 1 + 1e-9
"""Sums of bytes that differ by rounding alone are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeezed:
    """What devices do; the longest time from the first start to the last stop of a device, and of all."""

    rows: Rows
    busy: float
    makespan: float


def fastest(work: SplitWork, runs: Iterable[Squeezed]) -> Squeezed:
    """The run whose slowest device is done soonest, as decides how soon the next mini-batch can follow.

    Runs are made one after the other until one has no gaps.
    """
    loads = [0.0] * work.plan.num_devices
    for (device, _), seconds in work.seconds.items():
        loads[device] += seconds
    tried: list[Squeezed] = []
    for run in runs:
        tried.append(run)
        if run.busy <= max(loads) * _SLACK:
            break
    return min(tried, key=lambda run: (run.busy, run.makespan))


def squeezed(work: SplitWork, rows: Rows, room: Sequence[float]) -> Iterator[Squeezed]:
    """Several ways to close the gaps of an order.

    Args:
        work: of the plan.
        rows: for every device its forwards and gradients of inputs, in an order without circles.
        room: bytes of every device; in them the order must fit.
    """
    patience = (False, True) if work.timed else (False,)
    return (play(work, rows, room, window, patient) for window, patient in product(WINDOWS, patience))


def play(work: SplitWork, rows: Rows, room: Sequence[float], window: int = 0, patient: bool = False) -> Squeezed:
    """Run an order on the clock.

    Args:
        work: of the plan.
        rows: for every device its actions. Gradients of parameters that are listed keep their place.
        room: bytes of every device.
        window: by how many places an action may come before its turn.
        patient: rather wait for a message than delay what it brings by gradients of parameters.
    """
    clock = _Clock(work, rows, room, window, patient)
    clock.run()
    busy = max(stop - start for start, stop in zip(clock.begun, clock.free, strict=True) if start < inf)
    return Squeezed(rows=clock.done, busy=busy, makespan=max(clock.free))


@dataclass(slots=True)
class _Clock:
    work: SplitWork
    rows: Rows
    room: Sequence[float]
    window: int
    patient: bool
    rest: list[list[Action]] = field(init=False)
    done: list[list[Action]] = field(init=False)
    begun: list[float] = field(init=False)
    free: list[float] = field(init=False)
    held: list[float] = field(init=False)
    freeable: list[float] = field(init=False)
    weights: list[deque[Action]] = field(init=False)
    listed: set[Task] = field(init=False)
    missing: dict[Task, int] = field(init=False)
    arrived: dict[Task, float] = field(default_factory=dict)
    events: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        devices = range(len(self.rows))
        self.rest = [list(row) for row in self.rows]
        self.done, self.weights = [[] for _ in devices], [deque() for _ in devices]
        self.begun, self.free = [inf for _ in devices], [0.0 for _ in devices]
        self.held, self.freeable = [0.0 for _ in devices], [0.0 for _ in devices]
        self.listed = {(i, action) for i, row in enumerate(self.rows) for action in row if action.kind is Kind.WEIGHT}
        self.missing = dict(self.work.missing)
        self.events = [(0.0, device) for device in devices]

    def run(self) -> None:
        while self.events:
            time = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == time:
                touched.add(heapq.heappop(self.events)[1])
            for device in sorted(touched):
                if self.free[device] <= time:
                    self._act(device, time)

    def _act(self, device: int, time: float) -> None:
        found = self._choice(device, time)
        weights = self.weights[device]
        if found is not None and not (weights and self._is_full(device, self.rest[device][found])):
            self._start(device, self.rest[device].pop(found), time)
        elif weights and (found is not None or not self.patient or self._has_time(device, time)):
            self._start(device, weights.popleft(), time)

    def _choice(self, device: int, time: float) -> int | None:
        """The place of the first action that can run, and after which those that it passes still fit."""
        slack = least = self.room[device] * _SLACK - self.held[device] + self.freeable[device]
        for place, action in enumerate(self.rest[device][: self.window + 1]):
            kept = self._kept(device, action)
            if (place == 0 or kept <= least) and self._is_ready(device, action, time):
                return place
            slack -= kept
            least = min(least, slack)
        return None

    def _kept(self, device: int, action: Action) -> float:
        """Bytes that an action takes, or gives back; gradients of parameters that are not listed count with others."""
        forward = device, action._replace(kind=Kind.FORWARD)
        kept, pending = self.work.kept[forward], self.work.pending[forward]
        if action.kind is Kind.FORWARD:
            return kept
        if action.kind is Kind.WEIGHT:
            return -pending
        return pending - kept if (device, action._replace(kind=Kind.WEIGHT)) in self.listed else -kept

    def _is_ready(self, device: int, action: Action, time: float) -> bool:
        task = device, action
        return not self.missing.get(task) and self.arrived.get(task, 0.0) <= time

    def _is_full(self, device: int, action: Action) -> bool:
        return self.held[device] + self._kept(device, action) > self.room[device] * _SLACK

    def _has_time(self, device: int, time: float) -> bool:
        """Whether the next gradients of parameters are done before anything else is known to arrive."""
        end = time + self.work.seconds[device, self.weights[device][0]]
        expected = (
            self.arrived.get((device, action), 0.0)
            for action in self.rest[device][: self.window + 1]
            if not self.missing.get((device, action))
        )
        return all(not time < arrival < end for arrival in expected)

    def _start(self, device: int, action: Action, time: float) -> None:
        task = device, action
        self.begun[device] = min(self.begun[device], time)
        stop = self.free[device] = time + self.work.seconds[task]
        self.done[device].append(action)
        self._account(device, action)
        heapq.heappush(self.events, (stop, device))
        for reader, travel in self.work.readers.get(task, ()):
            self.missing[reader] -= 1
            self.arrived[reader] = max(self.arrived.get(reader, 0.0), stop + travel)
            if not self.missing[reader]:
                heapq.heappush(self.events, (self.arrived[reader], reader[0]))

    def _account(self, device: int, action: Action) -> None:
        self.held[device] += self._kept(device, action)
        weight = action._replace(kind=Kind.WEIGHT)
        if action.kind is Kind.INPUT and (device, weight) not in self.listed:
            pending = self.work.pending[device, action._replace(kind=Kind.FORWARD)]
            self.held[device] += pending
            self.freeable[device] += pending
            self.weights[device].append(weight)
        elif action.kind is Kind.WEIGHT and (device, action) not in self.listed:
            self.freeable[device] += self._kept(device, action)
