"""Orders for devices that hold several stages and pipelines: a clock starts what is furthest behind a steady pace.

Every action has a time at which it is due. Micro-batches enter at the pace of the busiest device, all pipelines at
once; their forwards and backwards move on by a stage in so and so many cycles, a cycle being what a stage takes for a
micro-batch. What is due first runs first. Due times only rank: an action starts when its inputs are there and its
device is free, so nothing waits in a circle.

A forward also waits while its device has no room for one more micro-batch. If all devices wait for room, the action
that is due first gets it nevertheless.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.clock import Clock
from lightning_gpp.schedules.memory import SLACK
from lightning_gpp.schedules.tasks import Rows
from lightning_gpp.schedules.work import Work, turns


class Pace(NamedTuple):
    """Cycles in which a forward, and a backward, moves on by a stage. Slow backwards let later forwards go first."""

    forward: float
    backward: float


def paced(work: Work, room: Sequence[float], due: Mapping[Action, float]) -> Rows:
    """The order on every device.

    Args:
        work: of the plan, backwards whole.
        room: bytes of every device.
        due: when each action is, in seconds from the start.
    """
    run = _Run(work, room, due)
    run.play()
    return run.clock.rows


@dataclass(slots=True)
class _Run:
    work: Work
    room: Sequence[float]
    due: Mapping[Action, float]
    clock: Clock = field(init=False)
    takes: list[float] = field(init=False)
    ranks: list[tuple[float, int, int, bool]] = field(init=False)
    """What is due first has the lowest."""
    kept: list[float] = field(init=False)
    lanes: list[list[deque[int]]] = field(init=False)
    """For every device forwards and backwards of each stage."""

    def __post_init__(self) -> None:
        numbers = self.work.tasks.numbers
        self.clock = Clock(len(self.room), self.work.tasks)
        self.takes = [self.work.takes[task] for task in numbers]
        self.ranks = [(self.due[a], device, a.stage, a.kind is Kind.FORWARD) for device, a in numbers]
        self.kept = [0.0 for _ in self.room]
        lanes: dict[tuple[int, int, Kind], deque[int]] = defaultdict(deque)
        for (device, (stage, kind, _)), number in numbers.items():
            lanes[device, stage, kind].append(number)
        self.lanes = [[lane for place, lane in lanes.items() if place[0] == device] for device in range(len(self.room))]

    def play(self) -> None:
        going = True
        while going:
            for device in self.clock.turns():
                self._start(self._first(device, fitting=True))
            heads = [lane for lane in (self._first(device) for device in range(len(self.room))) if lane]
            going = self._start(min(heads, key=lambda lane: self.ranks[lane[0]], default=None))

    def _first(self, device: int, *, fitting: bool = False) -> deque[int] | None:
        """The lane of what is due first, of what a device can go on with, as far as messages (and room) tell."""
        arrival, now, ranks = self.clock.arrival, self.clock.time, self.ranks
        best: deque[int] | None = None
        for lane in self.lanes[device]:
            sooner = lane and arrival[lane[0]] <= now and (best is None or ranks[lane[0]] < ranks[best[0]])
            if sooner and (not fitting or self._fits(device, lane[0])):
                best = lane
        return best

    def _fits(self, device: int, task: int) -> bool:
        forward = self.work.tasks.actions[task].kind is Kind.FORWARD
        return not forward or self.kept[device] + self.takes[task] <= self.room[device] * SLACK

    def _start(self, lane: deque[int] | None) -> bool:
        """Whether there is anything to start."""
        if lane is None:
            return False
        task = lane.popleft()
        self.clock.start(task)
        self.kept[self.work.tasks.devices[task]] += self.takes[task]
        return True


def due_times(work: Work, pace: Pace) -> dict[Action, float]:
    """When each action is due, in seconds from the start."""
    plan, busy, depths = work.plan, work.loads(), work.plan.depths()
    per_sample = max(busy) / work.batch_size
    cycle = sum(busy) / sum(len(plan.intervals(stage, work.batch_size)) for stage in range(len(plan.stages)))
    deepest = max(depths.values())
    due = {}
    for _, action in work.seconds:
        depth = depths[action.stage]
        cycles = (deepest - depth) * pace.forward
        if action.kind is Kind.BACKWARD:
            cycles = deepest * pace.forward + (depth - 1) * pace.backward
        due[action] = _entry(plan, action) * per_sample + cycles * cycle
    return due


def _entry(plan: Plan, action: Action) -> int:
    """Samples ahead of a micro-batch, or of those that other replicas take at the same time."""
    together = turns(plan.stages[action.stage])
    return action.micro_batch // together * together * plan.stages[action.stage].micro_batch_size
