"""Orders by a clock: gradients of inputs first, then forwards, and gradients of parameters where a device would wait.

A lane is a replica of a stage: it takes its micro-batches one after the other, and has its part of a device's room. All
slices of a stage are in one lane: gradients come from the last to the first.
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
from lightning_gpp.schedules.in_flight import action_samples, slice_samples
from lightning_gpp.schedules.memory import SLACK, limits_of, needs_of
from lightning_gpp.schedules.seq_1f1b import lanes as lanes_of
from lightning_gpp.schedules.tasks import Rows
from lightning_gpp.schedules.work import Work, turns
from lightning_gpp.slices import is_sliced, unsliced

_KINDS: Final = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
FORWARD, INPUT, WEIGHT = range(3)
"""Their places there: a clock looks them up too often for names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a device chooses.

    Args:
        ahead: for every stage by how many forwards of a replica, those of all its slices, may be ahead of its
            gradients of inputs.
        forwards_first: whether forwards come before gradients of inputs where both can start.
        patient: whether a device may wait for a message, rather than be late for it because of gradients of parameters,
            as long as another device has waited already: that costs nothing, for the longest wait counts.
    """

    ahead: Sequence[int]
    forwards_first: bool = False
    patient: bool = False


def forwards_ahead(plan: Plan, lead: float) -> list[int]:
    """For every stage the micro-batches that make `samples_ahead` on each of its replicas; at least one. For a slice,
    what the replica does of all slices of the stage."""
    if is_sliced(plan):
        return _slices_ahead(plan, lead)
    samples = samples_ahead(plan, lead)
    steps = [stage.micro_batch_size * turns(stage) for stage in plan.stages]
    return [max(1, int(samples[stage] / step + 1e-9)) for stage, step in enumerate(steps)]


def _slices_ahead(plan: Plan, lead: float) -> list[int]:
    whole, samples, sizes = unsliced(plan), slice_samples(plan, lead), action_samples(plan)
    steps = [size * turns(stage) for size, stage in zip(sizes, whole.plan.stages, strict=True)]
    return [max(len(whole.parts(number)), int(samples[number] / steps[number] + 1e-9)) for number in whole.numbers]


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
    lanes, loads, takes = _lanes(work, share), work.loads(), [work.takes[task] for task in work.tasks.numbers]
    for policy in policies:
        run = _Run(work, loads, policy, [replace(lane) for lane in lanes], best, takes)
        if run.ends():
            best, rows = run.seconds, run.clock.rows
    return work.order(rows)


@dataclass(slots=True)
class _Lane:
    """What a replica has to do, and what it has done."""

    index: int
    stage: int
    """The first slice, where it is cut."""
    slices: int
    device: int
    depth: int
    room: float
    whole: bool
    """Whether gradients of parameters are done with those of inputs."""
    tasks: Sequence[Sequence[int]]
    """Of every kind, as many of each."""
    done: list[int] = field(init=False, default_factory=lambda: [0 for _ in _KINDS])
    held: float = field(init=False, default=0)

    @property
    def pending(self) -> int:
        return self.done[INPUT] - self.done[WEIGHT]


def _lanes(work: Work, share: float) -> list[_Lane]:
    """All replicas; those of a device divide its room as their needs under 1F1B are."""
    depths, needs = work.plan.depths(), needs_of(work)
    limits, parts = limits_of(work, share, needs), lanes_of(work.plan)
    first = {part: members[0] for members in parts.values() for part in members}
    tasks = _tasks(work, first)
    totals: dict[int, float] = defaultdict(float)
    wanted: dict[tuple[int, int], float] = defaultdict(float)
    for (stage, device), need in needs.items():
        totals[device] += need
        wanted[first[stage], device] += need
    rooms = {place: limits[place[1]] * (need / totals[place[1]] if need else 0) for place, need in wanted.items()}
    return [
        _Lane(
            index=index,
            stage=stage,
            slices=len(parts[stage]),
            device=device,
            depth=depths[parts[stage][-1]],
            room=rooms[stage, device],
            whole=work.whole.issuperset(parts[stage]),
            tasks=own,
        )
        for index, ((stage, device), own) in enumerate(tasks.items())
    ]


def _tasks(work: Work, first: Mapping[int, int]) -> dict[tuple[int, int], list[list[int]]]:
    """For every lane, by its first slice and its device, the numbers of its tasks of every kind, in order."""
    found: dict[tuple[int, int], list[list[tuple[int, int, int]]]] = {}
    for (device, action), number in work.tasks.numbers.items():
        place = first[action.stage], device
        position = action.stage if action.kind is Kind.FORWARD else -action.stage
        kinds = found.setdefault(place, [[] for _ in _KINDS])
        kinds[_KINDS.index(action.kind)].append((action.micro_batch, position, number))
    return {place: [[number for *_, number in sorted(own)] for own in kinds] for place, kinds in found.items()}


@dataclass(slots=True)
class _Run:
    work: Work
    loads: Sequence[float]
    policy: Policy
    lanes: Sequence[_Lane]
    below: float
    """Give up as soon as it is certain that some device will take no less than these seconds."""
    takes: Sequence[float]
    """Bytes of every task, by number."""
    clock: Clock = field(init=False)
    on: list[list[_Lane]] = field(init=False)
    """The lanes of every device."""
    waited: list[float] = field(init=False)
    longest_wait: float = 0
    seconds: float = 0

    def __post_init__(self) -> None:
        self.clock = Clock(len(self.loads), self.work.tasks)
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
        ready: list[tuple[bool, int, int, int, _Lane, int]] = []
        blocked: list[_Lane] = []
        now, expected = self.clock.time, inf
        last = INPUT if self.policy.forwards_first else FORWARD
        for lane in self.on[device]:
            for kind in (INPUT, FORWARD):
                arrival = self._arrival(kind, lane)
                if arrival > now:
                    expected = min(expected, arrival)
                elif not self._has_room(kind, lane):
                    blocked.append(lane)
                else:
                    ready.append((kind == last, lane.depth, lane.done[kind], lane.index, lane, kind))
        urgent = self.policy.forwards_first and any(lane.pending for lane in blocked)
        if ready and not urgent:
            *_, lane, kind = min(ready) if len(ready) > 1 else ready[0]
            self._start(kind, lane)
        else:
            self._fill(device, expected, blocked)

    def _arrival(self, kind: int, lane: _Lane) -> float:
        """When the next task of a kind can start, as far as messages tell; infinite where that is not known."""
        number = lane.done[kind]
        if kind == FORWARD and number - lane.done[INPUT] >= self.policy.ahead[lane.stage]:
            return inf
        return self.clock.arrival[lane.tasks[kind][number]] if number < len(lane.tasks[kind]) else inf

    def _has_room(self, kind: int, lane: _Lane) -> bool:
        """Also where only the task itself can make more: with nothing kept but of a micro-batch whose last slice has
        not been there, or nothing that W could give back."""
        position, given_back = lane.done[kind], lane.done[WEIGHT]
        if position == given_back or (kind == FORWARD and position < (given_back // lane.slices + 1) * lane.slices):
            return True
        needed = lane.held + self.takes[lane.tasks[kind][position]]
        return needed <= lane.held or needed <= lane.room * SLACK

    def _fill(self, device: int, expected: float, blocked: Sequence[_Lane]) -> None:
        """Gradients of parameters: of a lane that lacks room, else of the one with the most to do, if there is time."""
        pending = [lane for lane in self.on[device] if lane.pending]
        if not pending:
            return
        lane = max(pending, key=lambda lane: (lane in blocked, lane.pending, -lane.index))
        needed = self.work.tasks.seconds[lane.tasks[WEIGHT][lane.done[WEIGHT]]]
        wait = self.waited[device] + expected - self.clock.free[device]
        late = not self.policy.patient or wait > self.longest_wait
        if lane in blocked or late or needed <= (expected - self.clock.time) * SLACK:
            self._start(WEIGHT, lane)

    def _start(self, kind: int, lane: _Lane) -> None:
        task = lane.tasks[kind][lane.done[kind]]
        if self.clock.time > self.clock.free[lane.device]:
            self._wait(lane.device)
        self.clock.start(task)
        lane.done[kind] += 1
        lane.held += self.takes[task]
        if kind == INPUT and lane.whole:
            lane.done[WEIGHT] += 1

    def _wait(self, device: int) -> None:
        """A device takes as long as it works and waits, from its first action on."""
        if self.clock.begun(device):
            self.waited[device] += self.clock.time - self.clock.free[device]
            self.longest_wait = max(self.longest_wait, self.waited[device])
            self.seconds = max(self.seconds, self.loads[device] + self.waited[device])

    def _force(self) -> bool:
        """Where all wait for room, a forward goes beyond the limits; False at the end."""
        waiting = [
            (lane.depth, lane.done[FORWARD], lane.index, lane)
            for lane in self.lanes
            if any(not self.clock.missing[task] for task in lane.tasks[FORWARD][lane.done[FORWARD] :][:1])
        ]
        if waiting:
            self._start(FORWARD, min(waiting)[-1])
        return bool(waiting)
