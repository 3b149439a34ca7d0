"""Orders by a clock: gradients of inputs first, then forwards, and gradients of parameters where a device would wait.

The clock knows seconds, bytes and messages. It starts only what can run, so its lists cannot wait in a circle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lanes import FORWARD, INPUT, WEIGHT, Lane, Work

_KINDS: Final = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)

_SLACK: Final = 1 + 1e-9
"""Sums of seconds or bytes that differ by rounding alone are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a device chooses.

    Args:
        ahead: for every lane by how many its forwards may be ahead of its gradients of inputs.
        forwards_first: whether forwards come before gradients of inputs where both can start.
        patient: whether a device may wait for a message, rather than be late for it because of gradients of parameters,
            as long as another device has waited already: that costs nothing, for the longest wait counts.
    """

    ahead: Sequence[int]
    forwards_first: bool = False
    patient: bool = False


def fill(work: Work, policies: Iterable[Policy]) -> Schedule:
    """Order the work of every device, by the policy under which the device that takes longest takes least.

    A device takes from its first start to its last stop. When it is free it takes gradients of inputs that it can
    compute, or a forward, if it has room for them, nearest to a sink first. Else it takes gradients of parameters: to
    make room, or to fill its time. Where all devices wait for room, the forward nearest to a sink goes beyond the
    limits.

    Args:
        work: of the plan.
        policies: to try, at least one; of equal ones the first counts.
    """
    rows: list[list[Action]] = []
    best = inf
    for policy in policies:
        clock = _Clock(work, policy, best)
        if clock.run():
            best, rows = clock.seconds, clock.rows
    return Schedule(tuple(map(tuple, rows)))


@dataclass(slots=True)
class _Clock:
    work: Work
    policy: Policy
    below: float
    """Give up as soon as it is certain that some device will take no less than these seconds."""
    rows: list[list[Action]] = field(init=False)
    free: list[float] = field(init=False)
    waited: list[float] = field(init=False)
    busy: list[float] = field(init=False)
    now: float = 0
    longest_wait: float = 0
    seconds: float = 0
    held: list[float] = field(init=False)
    done: tuple[list[int], list[int], list[int]] = field(init=False)
    missing: list[list[list[int]]] = field(init=False)
    arrived: list[list[list[float]]] = field(init=False)
    events: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        devices, lanes = range(len(self.work.on)), self.work.lanes
        self.rows, self.free, self.waited = [[] for _ in devices], [0.0 for _ in devices], [0.0 for _ in devices]
        self.busy, self.held = [0.0 for _ in devices], [0.0 for _ in lanes]
        for lane in lanes:
            self.busy[lane.device] += sum(map(sum, lane.seconds))
        self.seconds = max(self.busy)
        self.done = ([0 for _ in lanes], [0 for _ in lanes], [0 for _ in lanes])
        self.missing = [[list(row) for row in rows] for rows in self.work.missing]
        self.arrived = [[[0.0] * len(row) for row in rows] for rows in self.work.missing]
        self.events = [(0.0, device) for device in devices]

    def run(self) -> bool:
        while self.seconds < self.below and (self.events or self._force()):
            self.now, device = heapq.heappop(self.events)
            if self.free[device] <= self.now:
                self._act(device, self.now)
        return self.seconds < self.below

    def _act(self, device: int, time: float) -> None:
        ready: list[tuple[bool, int, int, int]] = []
        blocked: list[int] = []
        last, expected = (INPUT if self.policy.forwards_first else FORWARD), inf
        for lane in self.work.on[device]:
            for kind in (INPUT, FORWARD):
                arrival = self._next(kind, lane)
                if arrival > time:
                    expected = min(expected, arrival)
                elif not self._has_room(kind, lane):
                    blocked.append(lane)
                else:
                    ready.append((kind == last, self.work.lanes[lane].depth, self.done[kind][lane], lane))
        urgent = self.policy.forwards_first and any(self._pending(lane) for lane in blocked)
        if ready and not urgent:
            second, _, _, lane = min(ready)
            self._put(last if second else INPUT + FORWARD - last, lane, time)
        else:
            self._fill(device, time, expected, blocked)

    def _next(self, kind: int, lane: int) -> float:
        """When the next action of a kind can start, as far as messages tell; infinite where that is not known."""
        forwards, inputs = self.done[FORWARD][lane], self.done[INPUT][lane]
        if kind == FORWARD and forwards - inputs >= self.policy.ahead[lane]:
            return inf
        position = self.done[kind][lane]
        if position >= (forwards if kind == INPUT else len(self.work.lanes[lane].numbers)):
            return inf
        return inf if self.missing[kind][lane][position] else self.arrived[kind][lane][position]

    def _has_room(self, kind: int, lane: int) -> bool:
        """Also where only the action itself can make more: with nothing kept, or nothing that W could give back."""
        position = self.done[kind][lane]
        needed = self.held[lane] + self._change(kind, lane, position)
        return position == self.done[WEIGHT][lane] or needed <= max(self.held[lane], self.work.room[lane] * _SLACK)

    def _pending(self, lane: int) -> int:
        return self.done[INPUT][lane] - self.done[WEIGHT][lane]

    def _fill(self, device: int, time: float, expected: float, blocked: Sequence[int]) -> None:
        """Gradients of parameters: of a lane that lacks room, else of the one with the most to do, if there is time."""
        pending = [lane for lane in self.work.on[device] if self._pending(lane)]
        if not pending:
            return
        lane = max(pending, key=lambda lane: (lane in blocked, self._pending(lane), -lane))
        needed = self.work.lanes[lane].seconds[WEIGHT][self.done[WEIGHT][lane]]
        wait = self.waited[device] + expected - self.free[device]
        late = not self.policy.patient or wait > self.longest_wait
        if lane in blocked or late or needed <= (expected - time) * _SLACK:
            self._put(WEIGHT, lane, time)

    def _put(self, kind: int, lane: int, time: float) -> None:
        entry, position = self.work.lanes[lane], self.done[kind][lane]
        device = entry.device
        self._wait(device, time)
        stop = self.free[device] = time + entry.seconds[kind][position]
        self.done[kind][lane] += 1
        self.held[lane] += self._change(kind, lane, position)
        self._note(entry, kind, position)
        if kind == INPUT and not entry.split:
            self.done[WEIGHT][lane] += 1
        heapq.heappush(self.events, (stop, device))
        for reader in self.work.readers[kind][lane][position] if kind != WEIGHT else ():
            self._send(stop, *reader)

    def _note(self, lane: Lane, kind: int, position: int) -> None:
        name = Kind.BACKWARD if kind == INPUT and not lane.split else _KINDS[kind]
        self.rows[lane.device].append(Action(lane.stage, name, lane.numbers[position]))

    def _wait(self, device: int, time: float) -> None:
        """A device takes as long as it works and waits, from its first action on."""
        if self.rows[device]:
            self.waited[device] += time - self.free[device]
            self.longest_wait = max(self.longest_wait, self.waited[device])
            self.seconds = max(self.seconds, self.busy[device] + self.waited[device])

    def _change(self, kind: int, lane: int, position: int) -> float:
        """Bytes that an action takes, or gives back."""
        entry = self.work.lanes[lane]
        if kind == FORWARD:
            return entry.kept[position]
        return entry.pending[position] - entry.kept[position] if kind == INPUT else -entry.pending[position]

    def _send(self, stop: float, lane: int, kind: int, position: int, travel: float) -> None:
        arrived, missing = self.arrived[kind][lane], self.missing[kind][lane]
        arrived[position] = max(arrived[position], stop + travel)
        missing[position] -= 1
        if not missing[position]:
            heapq.heappush(self.events, (arrived[position], self.work.lanes[lane].device))

    def _force(self) -> bool:
        """Where all wait for room, a forward goes beyond the limits; False at the end."""
        lanes = self.work.lanes
        waiting = [
            (lanes[lane].depth, position, lane)
            for lane, position in enumerate(self.done[FORWARD])
            if position < len(lanes[lane].numbers) and not self.missing[FORWARD][lane][position]
        ]
        if waiting:
            self._put(FORWARD, min(waiting)[2], self.now)
        return bool(waiting)
