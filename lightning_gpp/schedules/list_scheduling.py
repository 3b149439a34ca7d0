"""List scheduling: whenever a device is free, a policy chooses one of its ready tasks.

Every order of this package that is not written down by hand comes from here; the policies are

    Priorities      the ready task of least rank that fits the memory (`device_orders`, `due_dates`)
    BubbleFilling   input gradients and forwards; weight gradients where the device would idle (`bubble_filling`)
    Compaction      a given order, whose actions may move up into gaps (`compaction`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.clock import Clock

SLACK: Final = 1 + 1e-9
"""Sums of bytes, or of seconds, that differ by rounding alone count as equal."""


class SchedulingPolicy(Protocol):
    """Chooses the tasks of free devices. What it returns starts at once."""

    def choose(self, device: int) -> int | None:
        """The task that a free device starts; None if it waits."""

    def force(self) -> int | None:
        """The task that starts beyond the memory limits when all devices wait for memory; None if there is none."""


def list_schedule(clock: Clock, policy: SchedulingPolicy) -> None:
    """Run tasks until the policy starts no more."""
    going = True
    while going:
        for device in clock.turns():
            task = policy.choose(device)
            if task is not None:
                clock.start(task)
        forced = policy.force()
        going = forced is not None
        if forced is not None:
            clock.start(forced)


@dataclass(slots=True)
class Priorities:
    """The policy that starts, of the heads of a device's lanes, the ready one of least rank.

    Args:
        clock: the clock.
        lanes: for every device queues of tasks, each to run in its order.
        ranks: for every task; those that compare must differ, or the earlier lane wins.
        limits: for every device the bytes that its tasks may hold together; None if memory does not matter.
    """

    clock: Clock
    lanes: Sequence[Sequence[deque[int]]]
    ranks: Sequence[tuple[float, ...]]
    limits: Sequence[float] | None = None
    held: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [0.0 for _ in self.lanes]

    def choose(self, device: int) -> int | None:
        return self._taken(self._first(device, fitting=self.limits is not None))

    def force(self) -> int | None:
        lanes = [lane for lane in map(self._first, range(len(self.lanes))) if lane]
        return self._taken(min(lanes, key=lambda lane: self.ranks[lane[0]], default=None))

    def waiting(self) -> list[int]:
        """The tasks at the head of all lanes."""
        return [lane[0] for lanes in self.lanes for lane in lanes if lane]

    def _first(self, device: int, *, fitting: bool = False) -> deque[int] | None:
        arrival, now, ranks = self.clock.arrival, self.clock.time, self.ranks
        best: deque[int] | None = None
        for lane in self.lanes[device]:
            sooner = lane and arrival[lane[0]] <= now and (best is None or ranks[lane[0]] < ranks[best[0]])
            if sooner and (not fitting or self._fits(device, lane[0])):
                best = lane
        return best

    def _fits(self, device: int, task: int) -> bool:
        """True if there is memory for a task. Only forwards need any."""
        tasks = self.clock.tasks
        if self.limits is None or tasks.actions[task].kind is not Kind.FORWARD:
            return True
        return self.held[device] + tasks.takes[task] <= self.limits[device] * SLACK

    def _taken(self, lane: deque[int] | None) -> int | None:
        if lane is None:
            return None
        task = lane.popleft()
        self.held[self.clock.tasks.devices[task]] += self.clock.tasks.takes[task]
        return task
