"""The clock behind `adaptive`: devices, messages and memory, played in the order of time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import RELEASES, Action, Kind
from lightning_gpp.schedules.merge import Task
from lightning_gpp.schedules.messages import carries_gradient, derive_messages, samples_of
from lightning_gpp.schedules.one_f_one_b import warm_up


@dataclass(frozen=True, slots=True)
class Policy:
    """How a device chooses.

    `limit`: micro-batches in flight on a stage, in those that 1F1B has. `deep_first`: among equals the stage nearest to
    a sink, else the earliest micro-batch. `patient`: gradients of parameters only where nothing else is about to come.
    `alternate`: after gradients of inputs a forward comes first, else always gradients of inputs.
    """

    limit: float
    deep_first: bool
    patient: bool
    alternate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """What has to be done: the same for all policies.

    `seconds[device, action]`; `readers[task]`: who waits for it, and for how long its message travels; `missing`: how
    many messages a task waits for; `numbers[device, stage]`: micro-batches; `kept` and `pending` by forward: bytes from
    it to the gradients of the inputs, and from there to those of the parameters; `usual`: in flight in 1F1B; `room`:
    bytes of each device.
    """

    plan: Plan
    split: frozenset[tuple[int, int]]
    seconds: Mapping[Task, float]
    readers: Mapping[Task, list[tuple[Task, float]]]
    missing: Mapping[Task, int]
    numbers: Mapping[tuple[int, int], list[int]]
    kept: Mapping[Task, float]
    pending: Mapping[Task, float]
    depths: Mapping[int, int]
    usual: Mapping[int, int]
    room: tuple[float, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan, batch_size: int) -> Tasks:
        places = [(device, stage) for device in range(plan.num_devices) for stage in plan.stages_on(device)]
        numbers = {(device, stage): plan.micro_batches(stage, device, batch_size) for device, stage in places}
        waited_for = {edge.dst for edge in plan.edges if carries_gradient(edge) and not edge.artificial}
        split = frozenset(
            (s, i) for (_, s), found in numbers.items() if s in waited_for and _weighs(plan, s) for i in found
        )
        known = any(stage.figures.forward_seconds.at(1) for stage in plan.stages)
        seconds, kept, pending = {}, {}, {}
        for device, stage in places:
            shares = samples_of(plan, stage, device, batch_size)
            figures, size = plan.stages[stage].figures, plan.stages[stage].micro_batch_size
            for number in numbers[device, stage]:
                part = shares[number] / max(1, max(shares))
                for kind, cost in zip(_KINDS, _costs(plan, stage, known), strict=True):
                    seconds[device, Action(stage, kind, number)] = cost * part
                forward = device, Action(stage, Kind.FORWARD, number)
                kept[forward] = figures.activation_bytes.at(size) * part or part
                pending[forward] = min(kept[forward], figures.pending_bytes.at(size) * part or kept[forward])
        usual = warm_up(plan, batch_size)
        readers, missing = _links(plan, batch_size, split, known)
        return cls(
            plan=plan,
            split=split,
            seconds=seconds,
            readers=readers,
            missing=missing,
            numbers=numbers,
            kept=kept,
            pending=pending,
            depths=plan.depths(),
            usual=usual,
            room=plan.memory_bytes or _room(plan, kept, usual),
            stages=tuple(plan.stages_on(device) for device in range(plan.num_devices)),
        )

    def back(self, stage: int, number: int) -> Kind:
        """The kind of action that makes the gradients of a stage's inputs."""
        return Kind.INPUT if (stage, number) in self.split else Kind.BACKWARD


def _room(plan: Plan, kept: Mapping[Task, float], usual: Mapping[int, int]) -> tuple[float, ...]:
    """Where the memory is not known: as much as 1F1B needs on the device that needs most."""
    most: dict[int, float] = defaultdict(float)
    for device in range(plan.num_devices):
        for stage in plan.stages_on(device):
            sizes = [size for (d, action), size in kept.items() if (d, action.stage) == (device, stage)]
            most[device] += usual[stage] * max(sizes, default=0.0)
    return (max(most.values()) * (1 + 1e-9),) * plan.num_devices


_KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD)


def _weighs(plan: Plan, stage: int) -> bool:
    """Whether the gradients of a stage's parameters are worth an action of their own."""
    figures = plan.stages[stage].figures
    return not figures.forward_seconds.at(1) or figures.weight_seconds.at(1) > 0


def _costs(plan: Plan, stage: int, known: bool) -> tuple[float, float, float, float]:
    """Seconds of a forward, of gradients of inputs and parameters, and of both; units where they are not known."""
    if not known:
        return 1.0, 1.0, 1.0, 2.0
    figures, size = plan.stages[stage].figures, plan.stages[stage].micro_batch_size
    forward, inputs, weight = (
        cost.at(size) for cost in (figures.forward_seconds, figures.input_seconds, figures.weight_seconds)
    )
    again = forward if plan.stages[stage].recompute else 0.0
    return forward, again + inputs, weight, again + inputs + weight


def _links(
    plan: Plan, batch_size: int, split: frozenset[tuple[int, int]], known: bool
) -> tuple[dict[Task, list[tuple[Task, float]]], dict[Task, int]]:
    readers: dict[Task, list[tuple[Task, float]]] = defaultdict(list)
    missing: dict[Task, int] = defaultdict(int)
    for message in derive_messages(plan, batch_size, True, split):
        edge = plan.edges[message.edge]
        if edge.src != SOURCE:
            travel = edge.seconds.at(message.stop - message.start) if known and message.src != message.dst else 0.0
            readers[message.src, message.producer].append(((message.dst, message.consumer), travel))
            missing[message.dst, message.consumer] += 1
    return readers, missing


@dataclass(slots=True)
class Clock:
    """Plays one policy; `run` fills `done`, `makespan` and `overdrawn` (whether memory had to be exceeded)."""

    tasks: Tasks
    policy: Policy
    done: list[list[Action]] = field(init=False)
    makespan: float = 0.0
    overdrawn: bool = False
    missing: dict[Task, int] = field(init=False)
    coming: dict[int, list[float]] = field(init=False)
    next_forward: dict[tuple[int, int], int] = field(init=False)
    next_back: dict[tuple[int, int], int] = field(init=False)
    flying: dict[tuple[int, int], int] = field(init=False)
    weights: dict[int, list[Action]] = field(init=False)
    held: list[float] = field(init=False)
    latest: list[Kind] = field(init=False)
    idle: set[int] = field(init=False)
    events: list[tuple[float, int, int, Action | None, Task | None]] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        devices = range(self.tasks.plan.num_devices)
        self.done = [[] for _ in devices]
        self.missing = defaultdict(int, self.tasks.missing)
        self.coming = {device: [] for device in devices}
        self.next_forward = dict.fromkeys(self.tasks.numbers, 0)
        self.next_back = dict.fromkeys(self.tasks.numbers, 0)
        self.flying = dict.fromkeys(self.tasks.numbers, 0)
        self.weights = {device: [] for device in devices}
        self.held = [0.0 for _ in devices]
        self.latest = [Kind.FORWARD for _ in devices]
        self.idle = set(devices)

    def run(self) -> Clock:
        for device in range(len(self.done)):
            self._start(device, 0.0)
        while self.events or self._force():
            time = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] == time:
                touched.add(self._happen())
            for device in sorted(touched & self.idle):
                self._start(device, time)
        return self

    def _happen(self) -> int:
        """The end of an action, or the arrival of a message; the device that it concerns."""
        time, _, device, action, arrived = heapq.heappop(self.events)
        self.makespan = max(self.makespan, time)
        if arrived is not None:
            self.missing[arrived] -= 1
            self.coming[device].remove(time)
            return device
        if action is not None:
            self._finish(device, action, time)
        return device

    def _finish(self, device: int, action: Action, time: float) -> None:
        self.idle.add(device)
        forward = device, action._replace(kind=Kind.FORWARD)
        if action.kind is Kind.INPUT:
            self.weights[device].append(action._replace(kind=Kind.WEIGHT))
            self.held[device] -= self.tasks.kept[forward] - self.tasks.pending[forward]
        elif action.kind in RELEASES:
            freed = self.tasks.pending if action.kind is Kind.WEIGHT else self.tasks.kept
            self.held[device] -= freed[forward]
            self.flying[device, action.stage] -= 1
        for reader, travel in self.tasks.readers.get((device, action), ()):
            self._push(time + travel, reader[0], None, reader)

    def _push(self, time: float, device: int, action: Action | None, arrived: Task | None) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, device, action, arrived))

    def _start(self, device: int, time: float) -> None:
        action = self._choice(device, time)
        if action is not None:
            self._begin(device, action, time)

    def _begin(self, device: int, action: Action, time: float) -> None:
        self.idle.discard(device)
        self.done[device].append(action)
        self.latest[device] = self.latest[device] if action.kind is Kind.WEIGHT else action.kind
        place = device, action.stage
        if action.kind is Kind.FORWARD:
            self.next_forward[place] += 1
            self.flying[place] += 1
            self.held[device] += self.tasks.kept[device, action]
        elif action.kind is Kind.WEIGHT:
            self.weights[device].remove(action)
        else:
            self.next_back[place] += 1
        end = time + self.tasks.seconds[device, action]
        self._push(end, device, action, None)
        for reader, travel in self.tasks.readers.get((device, action), ()):
            self.coming[reader[0]].append(end + travel)

    def _choice(self, device: int, time: float) -> Action | None:
        backs = [action for action in self._backs(device) if not self.missing[device, action]]
        forwards = [action for action in self._forwards(device) if not self.missing[device, action]]
        allowed = [action for action in forwards if self._has_room(device, action)]
        turn = self.policy.alternate and self.latest[device] is not Kind.FORWARD
        for ready in (allowed, backs) if turn else (backs, allowed):
            if ready:
                return min(ready, key=self._rank)
        if self.weights[device] and (forwards or not self.policy.patient or self._has_time(device, time)):
            return self.weights[device][0]
        return None

    def _has_time(self, device: int, time: float) -> bool:
        """Whether the oldest gradients of parameters can be done before anything else is known to come."""
        end = time + self.tasks.seconds[device, self.weights[device][0]]
        return all(arrival >= end for arrival in self.coming[device])

    def _forwards(self, device: int) -> list[Action]:
        return [Action(stage, Kind.FORWARD, number) for stage, number in self._heads(device, self.next_forward)]

    def _backs(self, device: int) -> list[Action]:
        heads = self._heads(device, self.next_back)
        begun = [(s, i) for s, i in heads if self.next_back[device, s] < self.next_forward[device, s]]
        return [Action(stage, self.tasks.back(stage, number), number) for stage, number in begun]

    def _heads(self, device: int, position: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
        """For every stage of a device the micro-batch that is next."""
        heads = []
        for stage in self.tasks.stages[device]:
            numbers = self.tasks.numbers[device, stage]
            if position[device, stage] < len(numbers):
                heads.append((stage, numbers[position[device, stage]]))
        return heads

    def _has_room(self, device: int, action: Action) -> bool:
        if self.flying[device, action.stage] >= self.policy.limit * self.tasks.usual[action.stage]:
            return False
        return self.held[device] + self.tasks.kept[device, action] <= self.tasks.room[device]

    def _rank(self, action: Action) -> tuple[int, int]:
        depth, number = self.tasks.depths[action.stage], action.micro_batch
        return (depth, number) if self.policy.deep_first else (number, depth)

    def _force(self) -> bool:
        """Where all wait for memory, the earliest forward goes beyond it; False at the end."""
        waiting = [
            (action.micro_batch, self.tasks.depths[action.stage], device, action)
            for device in sorted(self.idle)
            for action in self._forwards(device)
            if not self.missing[device, action]
        ]
        if waiting:
            _, _, device, action = min(waiting)
            self.overdrawn = True
            self._begin(device, action, self.makespan)
        return bool(waiting)
