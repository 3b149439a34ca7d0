"""Orders by a clock: gradients of inputs first, then forwards, and gradients of parameters where a device would wait.

A lane is a replica of a stage: it takes its micro-batches one after the other, and has its part of a device's room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Kind, Schedule
from lightning_gpp.schedules.clock import Clock
from lightning_gpp.schedules.hand_split import samples_ahead
from lightning_gpp.schedules.room import SLACK, limits_of, needs_of
from lightning_gpp.schedules.work import Rows, Task, Work, turns

_KINDS: Final = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a device chooses.

    Args:
        ahead: for every stage by how many forwards of a replica may be ahead of its gradients of inputs.
        forwards_first: whether forwards come before gradients of inputs where both can start.
        patient: whether a device may wait for a message, rather than be late for it because of gradients of parameters,
            as long as another device has waited already: that costs nothing, for the longest wait counts.
    """

    ahead: Sequence[int]
    forwards_first: bool = False
    patient: bool = False


def forwards_ahead(plan: Plan, lead: float) -> list[int]:
    """For every stage the micro-batches that make `samples_ahead` on each of its replicas; at least one."""
    samples = samples_ahead(plan, lead)
    steps = [stage.micro_batch_size * turns(stage) for stage in plan.stages]
    return [max(1, int(samples[stage] / step + 1e-9)) for stage, step in enumerate(steps)]


def fill(work: Work, policies: Iterable[Policy], share: float = 1) -> Schedule:
    """Order the work of every device, by the policy under which the device that takes longest takes least.

    A device takes from its first start to its last stop. When it is free it takes gradients of inputs that it can
    compute, or a forward, if it has room for them, nearest to a sink first. Else it takes gradients of parameters: to
    make room, or to fill its time. Where all devices wait for room, the forward nearest to a sink goes beyond the
    limits.

    Args:
        work: of the plan, backwards split.
        policies: to try, at least one; of equal ones the first counts.
        share: of what 1F1B keeps on the neediest device, where the plan does not know what room there is.
    """
    rows: Rows = []
    best = inf
    lanes, loads = _lanes(work, share), work.loads()
    for policy in policies:
        run = _Run(work, loads, policy, [replace(lane) for lane in lanes], best)
        if run.ends():
            best, rows = run.seconds, run.clock.rows
    return work.order(rows)


@dataclass(slots=True)
class _Lane:
    """What a replica has to do, and what it has done."""

    index: int
    stage: int
    device: int
    depth: int
    room: float
    tasks: Mapping[Kind, Sequence[Task]]
    done: dict[Kind, int] = field(init=False, default_factory=lambda: dict.fromkeys(_KINDS, 0))
    held: float = field(init=False, default=0)

    @property
    def pending(self) -> int:
        return self.done[Kind.INPUT] - self.done[Kind.WEIGHT]


def _lanes(work: Work, share: float) -> list[_Lane]:
    """All replicas; those of a device divide its room as their needs under 1F1B are."""
    depths, needs, limits = work.plan.depths(), needs_of(work), limits_of(work, share)
    tasks: dict[tuple[int, int], dict[Kind, list[Task]]] = {place: {kind: [] for kind in _KINDS} for place in needs}
    for device, action in work.seconds:
        tasks[action.stage, device][action.kind].append((device, action))
    totals: dict[int, float] = defaultdict(float)
    for (_, device), need in needs.items():
        totals[device] += need
    rooms = {place: limits[place[1]] * (need / totals[place[1]] if need else 0) for place, need in needs.items()}
    places = enumerate(tasks.items())
    return [_Lane(i, *place, depths[place[0]], rooms[place], own) for i, (place, own) in places]


@dataclass(slots=True)
class _Run:
    work: Work
    loads: Sequence[float]
    policy: Policy
    lanes: Sequence[_Lane]
    below: float
    """Give up as soon as it is certain that some device will take no less than these seconds."""
    clock: Clock = field(init=False)
    on: list[list[_Lane]] = field(init=False)
    """The lanes of every device."""
    waited: list[float] = field(init=False)
    longest_wait: float = 0
    seconds: float = 0

    def __post_init__(self) -> None:
        self.clock = Clock.of(self.work)
        self.on = [[lane for lane in self.lanes if lane.device == device] for device in range(len(self.loads))]
        self.waited = [0.0 for _ in self.loads]
        self.seconds = max(self.loads)

    def ends(self) -> bool:
        """Go on until everything is done; False if that takes too long."""
        going = True
        while going and self.seconds < self.below:
            for device in self.clock.turns():
                self._act(device)
                if self.seconds >= self.below:
                    return False
            going = self._force()
        return self.seconds < self.below

    def _act(self, device: int) -> None:
        ready: list[tuple[bool, int, int, int, _Lane, Kind]] = []
        blocked: list[_Lane] = []
        last, expected = (Kind.INPUT if self.policy.forwards_first else Kind.FORWARD), inf
        for lane in self.on[device]:
            for kind in (Kind.INPUT, Kind.FORWARD):
                arrival = self._arrival(kind, lane)
                if arrival > self.clock.time:
                    expected = min(expected, arrival)
                elif not self._has_room(kind, lane):
                    blocked.append(lane)
                else:
                    ready.append((kind is last, lane.depth, lane.done[kind], lane.index, lane, kind))
        urgent = self.policy.forwards_first and any(lane.pending for lane in blocked)
        if ready and not urgent:
            *_, lane, kind = min(ready)
            self._start(kind, lane)
        else:
            self._fill(device, expected, blocked)

    def _arrival(self, kind: Kind, lane: _Lane) -> float:
        """When the next task of a kind can start, as far as messages tell; infinite where that is not known."""
        if kind is Kind.FORWARD and lane.done[kind] - lane.done[Kind.INPUT] >= self.policy.ahead[lane.stage]:
            return inf
        tasks, done = lane.tasks[kind], lane.done[kind]
        return self.clock.arrival(tasks[done]) if done < len(tasks) else inf

    def _has_room(self, kind: Kind, lane: _Lane) -> bool:
        """Also where only the task itself can make more: with nothing kept, or nothing that W could give back."""
        position = lane.done[kind]
        needed = lane.held + self.work.takes[lane.tasks[kind][position]]
        return position == lane.done[Kind.WEIGHT] or needed <= max(lane.held, lane.room * SLACK)

    def _fill(self, device: int, expected: float, blocked: Sequence[_Lane]) -> None:
        """Gradients of parameters: of a lane that lacks room, else of the one with the most to do, if there is time."""
        pending = [lane for lane in self.on[device] if lane.pending]
        if not pending:
            return
        lane = max(pending, key=lambda lane: (lane in blocked, lane.pending, -lane.index))
        needed = self.work.seconds[lane.tasks[Kind.WEIGHT][lane.done[Kind.WEIGHT]]]
        wait = self.waited[device] + expected - self.clock.free[device]
        late = not self.policy.patient or wait > self.longest_wait
        if lane in blocked or late or needed <= (expected - self.clock.time) * SLACK:
            self._start(Kind.WEIGHT, lane)

    def _start(self, kind: Kind, lane: _Lane) -> None:
        task = lane.tasks[kind][lane.done[kind]]
        self._wait(task[0])
        self.clock.start(task)
        lane.done[kind] += 1
        lane.held += self.work.takes[task]
        if kind is Kind.INPUT and lane.stage in self.work.whole:
            lane.done[Kind.WEIGHT] += 1

    def _wait(self, device: int) -> None:
        """A device takes as long as it works and waits, from its first action on."""
        if self.clock.rows[device]:
            self.waited[device] += self.clock.time - self.clock.free[device]
            self.longest_wait = max(self.longest_wait, self.waited[device])
            self.seconds = max(self.seconds, self.loads[device] + self.waited[device])

    def _force(self) -> bool:
        """Where all wait for room, a forward goes beyond the limits; False at the end."""
        waiting = [
            (lane.depth, lane.done[Kind.FORWARD], lane.index, lane)
            for lane in self.lanes
            if any(not self.clock.missing[task] for task in lane.tasks[Kind.FORWARD][lane.done[Kind.FORWARD] :][:1])
        ]
        if waiting:
            self._start(Kind.FORWARD, min(waiting)[-1])
        return bool(waiting)
