"""List scheduling with split backwards: input gradients and forwards, and weight gradients to fill bubbles.

Each replica of a stage runs its micro-batches in order and has its share of the device's memory. All slices of a stage
are one replica's work: forwards from the first slice to the last, gradients from the last to the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Kind, Schedule
from lightning_gpp.schedules.list_scheduling import SLACK, Clock, DeviceOrders, in_order, list_schedule
from lightning_gpp.schedules.one_f_one_b import action_samples, limits_of, needs_of, samples_ahead
from lightning_gpp.schedules.one_f_one_b import lanes as lanes_of
from lightning_gpp.schedules.work import Work, turns
from lightning_gpp.slices import unsliced

_KINDS: Final = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
FORWARD, INPUT, WEIGHT = range(3)
"""Indices into `_KINDS`, because schedulers look kinds up too often for enum members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Rules by which a device chooses between ready tasks.

    Args:
        ahead: for every stage the number of forwards, over all slices, by which a replica may be ahead of its input
            gradients.
        forwards_first: whether forwards come before input gradients if both are ready.
        patient: whether a device idles until a message arrives if weight gradients would delay the task that needs it.
            It does so only while another device has idled longer, since the longest idle time counts.
    """

    ahead: Sequence[int]
    forwards_first: bool = False
    patient: bool = False


def forwards_ahead(plan: Plan, lead: float) -> list[int]:
    """Number of actions of every stage, over all its slices, that amount to `samples_ahead` on each replica."""
    full, samples, sizes = unsliced(plan), samples_ahead(plan, lead), action_samples(plan)
    steps = [size * turns(stage) for size, stage in zip(sizes, full.plan.stages, strict=True)]
    return [max(len(full.parts(number)), int(samples[number] / steps[number] + 1e-9)) for number in full.numbers]


def fill(
    work: Work, preferences: Iterable[Preference], share: float = 1, known: Iterable[DeviceOrders] = ()
) -> Schedule:
    """Order every device by the preference under which the slowest device takes the least time from its first start.

    A free device starts a ready input gradient, or a forward for which it has memory, nearest to a sink first.
    Otherwise it starts weight gradients: to free memory, or to fill its bubble. If all devices wait for memory, the
    forward nearest to a sink starts beyond the limits.

    Args:
        work: the plan's work, with split backwards.
        preferences: at least one; among equal results the first wins.
        share: memory limit if the plan has none, relative to the peak of the neediest device under 1F1B.
        known: orders that win if every preference makes the slowest device finish later.
    """
    rows: DeviceOrders = []
    best = inf
    replicas, loads = _replicas(work, share), work.loads()
    for preference in preferences:
        clock = Clock(len(loads), work.tasks)
        policy = BubbleFilling(clock, loads, preference, [replace(replica) for replica in replicas], best)
        list_schedule(clock, policy)
        if policy.seconds < best:
            best, rows = policy.seconds, clock.rows
    for order in known:
        seconds = in_order(work.tasks, order).busy
        if seconds * SLACK < best and work.fits(work.peaks(order)):
            best, rows = seconds, order
    return work.order(rows)


@dataclass(slots=True)
class _Replica:
    """The tasks of one replica of a stage, and how many of them have started."""

    index: int
    stage: int
    """The first slice if the stage is sliced."""
    slices: int
    device: int
    depth: int
    limit: float
    unsplit: bool
    """True if input and weight gradients are one task."""
    tasks: Sequence[Sequence[int]]
    """Tasks of every kind, the same number of each."""
    done: list[int] = field(init=False, default_factory=lambda: [0 for _ in _KINDS])
    held: float = field(init=False, default=0)

    @property
    def pending(self) -> int:
        """Weight gradients that could run."""
        return self.done[INPUT] - self.done[WEIGHT]

    def fits(self, kind: int, taken: float) -> bool:
        """True if a task fits the memory, or refusing it would deadlock: nothing else is held, or no pending weight
        gradients could free memory."""
        position, freed = self.done[kind], self.done[WEIGHT]
        if position == freed or (kind == FORWARD and position < (freed // self.slices + 1) * self.slices):
            return True
        needed = self.held + taken
        return needed <= self.held or needed <= self.limit * SLACK


def _replicas(work: Work, share: float) -> list[_Replica]:
    """All replicas. Those on one device share its memory in proportion to their needs under 1F1B."""
    depths, needs = work.plan.depths(), needs_of(work)
    limits, parts = limits_of(work, share, needs), lanes_of(work.plan)
    first = {part: members[0] for members in parts.values() for part in members}
    totals: dict[int, float] = defaultdict(float)
    wanted: dict[tuple[int, int], float] = defaultdict(float)
    for (stage, device), need in needs.items():
        totals[device] += need
        wanted[first[stage], device] += need
    shares = {place: limits[place[1]] * (need / totals[place[1]] if need else 0) for place, need in wanted.items()}
    return [
        _Replica(
            index=index,
            stage=stage,
            slices=len(parts[stage]),
            device=device,
            depth=depths[parts[stage][-1]],
            limit=shares[stage, device],
            unsplit=work.unsplit.issuperset(parts[stage]),
            tasks=own,
        )
        for index, ((stage, device), own) in enumerate(_tasks(work, first).items())
    ]


def _tasks(work: Work, first: Mapping[int, int]) -> dict[tuple[int, int], list[list[int]]]:
    """For every replica, by its first slice and device, the numbers of its tasks of every kind, in order."""
    tasks: dict[tuple[int, int], list[list[tuple[int, int, int]]]] = {}
    for (device, action), number in work.tasks.numbers.items():
        place = first[action.stage], device
        position = action.stage if action.kind is Kind.FORWARD else -action.stage
        kinds = tasks.setdefault(place, [[] for _ in _KINDS])
        kinds[_KINDS.index(action.kind)].append((action.micro_batch, position, number))
    return {place: [[number for *_, number in sorted(own)] for own in kinds] for place, kinds in tasks.items()}


_TaskRank = tuple[bool, int, int, int, _Replica, int]
"""The rank of a task (four numbers), its replica and its kind."""


@dataclass(slots=True)
class BubbleFilling:
    """The policy of `fill`. It stops as soon as some device is certain to take `below` seconds."""

    clock: Clock
    loads: Sequence[float]
    preference: Preference
    replicas: Sequence[_Replica]
    below: float
    on: list[list[_Replica]] = field(init=False)
    """The replicas of every device."""
    idle: list[float] = field(init=False)
    longest_idle: float = 0
    seconds: float = field(init=False)
    """Lower bound on the seconds of the slowest device from its first start to its last end; exact at the end."""

    def __post_init__(self) -> None:
        devices = range(len(self.loads))
        self.on = [[replica for replica in self.replicas if replica.device == device] for device in devices]
        self.idle = [0.0 for _ in devices]
        self.seconds = max(self.loads)

    def choose(self, device: int) -> int | None:
        if self.seconds >= self.below:
            return None
        ready, blocked, expected = self._candidates(device)
        urgent = self.preference.forwards_first and any(replica.pending for replica in blocked)
        if ready and not urgent:
            *_, replica, kind = min(ready) if len(ready) > 1 else ready[0]
            return self._started(kind, replica)
        return self._filler(device, expected, blocked)

    def _candidates(self, device: int) -> tuple[list[_TaskRank], list[_Replica], float]:
        """Ready tasks that fit the memory, replicas whose tasks do not fit, and the time of the next arrival."""
        ready: list[_TaskRank] = []
        blocked: list[_Replica] = []
        now, expected, takes = self.clock.time, inf, self.clock.tasks.takes
        last = INPUT if self.preference.forwards_first else FORWARD
        for replica in self.on[device]:
            for kind in (INPUT, FORWARD):
                arrival = self._arrival(kind, replica)
                if arrival > now:
                    expected = min(expected, arrival)
                elif not replica.fits(kind, takes[replica.tasks[kind][replica.done[kind]]]):
                    blocked.append(replica)
                else:
                    ready.append((kind == last, replica.depth, replica.done[kind], replica.index, replica, kind))
        return ready, blocked, expected

    def force(self) -> int | None:
        """The forward nearest to a sink, if all devices wait for memory."""
        if self.seconds >= self.below:
            return None
        missing = self.clock.missing
        waiting = [
            (replica.depth, replica.done[FORWARD], replica.index, replica)
            for replica in self.replicas
            if any(not missing[task] for task in replica.tasks[FORWARD][replica.done[FORWARD] :][:1])
        ]
        return self._started(FORWARD, min(waiting)[-1]) if waiting else None

    def _arrival(self, kind: int, replica: _Replica) -> float:
        """Time at which the inputs of the next task of a kind are there; infinite if that is unknown."""
        number = replica.done[kind]
        if kind == FORWARD and number - replica.done[INPUT] >= self.preference.ahead[replica.stage]:
            return inf
        return self.clock.arrival[replica.tasks[kind][number]] if number < len(replica.tasks[kind]) else inf

    def _filler(self, device: int, expected: float, blocked: Sequence[_Replica]) -> int | None:
        """Weight gradients of a replica that lacks memory, or else of the one with most pending if time allows."""
        pending = [replica for replica in self.on[device] if replica.pending]
        if not pending:
            return None
        replica = max(pending, key=lambda entry: (entry in blocked, entry.pending, -entry.index))
        needed = self.clock.tasks.seconds[replica.tasks[WEIGHT][replica.done[WEIGHT]]]
        idle = self.idle[device] + expected - self.clock.free[device]
        late = not self.preference.patient or idle > self.longest_idle
        if replica in blocked or late or needed <= (expected - self.clock.time) * SLACK:
            return self._started(WEIGHT, replica)
        return None

    def _started(self, kind: int, replica: _Replica) -> int:
        task = replica.tasks[kind][replica.done[kind]]
        if self.clock.time > self.clock.free[replica.device]:
            self._count_idle(replica.device)
        replica.done[kind] += 1
        replica.held += self.clock.tasks.takes[task]
        if kind == INPUT and replica.unsplit:
            replica.done[WEIGHT] += 1
        return task

    def _count_idle(self, device: int) -> None:
        """A device takes as long as it works and idles, from its first task on."""
        if self.clock.has_begun(device):
            self.idle[device] += self.clock.time - self.clock.free[device]
            self.longest_idle = max(self.longest_idle, self.idle[device])
            self.seconds = max(self.seconds, self.loads[device] + self.idle[device])
