"""The tasks of one mini-batch with their seconds, bytes and dependencies, for schedules that weigh actions.

Seconds and bytes are the plan's. If the plan has no times, each action takes one unit per sample (none for a stage that
holds only the user's step), and message times are ignored; if it has no bytes, the same holds for them and the memory
limits.

List schedulers, the simulator and the evaluator of drafts all count bytes by the rules of `allocations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, Generic, TypeVar

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Figures, Plan, Stage
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.list_scheduling import DeviceOrders, Task, TaskGraph
from lightning_gpp.schedules.lowering import derive_messages, samples_of


def duration(figures: Figures, kind: Kind, num_samples: int) -> float:
    """Seconds of an action of a stage with these figures, whose replica has so many samples of the micro-batch."""
    inputs, weights = figures.input_seconds.at(num_samples), figures.weight_seconds.at(num_samples)
    seconds = {Kind.BACKWARD: inputs + weights, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    return seconds[kind] if kind in seconds else figures.forward_seconds.at(num_samples)


def allocations(figures: Figures, num_samples: int, *, recomputes: bool) -> dict[Kind, float]:
    """Bytes that an action of each kind allocates, or frees if negative.

    Args:
        figures: those of the stage.
        num_samples: samples of the micro-batch.
        recomputes: whether recomputations are actions of their own; otherwise they are part of the backwards.
    """
    offloaded, working = figures.offloaded_bytes.at(num_samples), figures.working_bytes.at(num_samples)
    kept = figures.activation_bytes.at(num_samples) + offloaded
    held = kept + working if recomputes else kept
    left = min(kept + working, figures.pending_bytes.at(num_samples))
    return {
        Kind.FORWARD: kept,
        Kind.OFFLOAD: -offloaded,
        Kind.LOAD: offloaded,
        Kind.RECOMPUTE: working,
        Kind.INPUT: left - held,
        Kind.WEIGHT: -left,
        Kind.BACKWARD: -held,
    }


def peak(changes: Iterable[float]) -> float:
    """The most bytes held at a time, from a sequence of allocations (positive) and frees (negative)."""
    return max(accumulate(changes, initial=0.0))


MOST_COPIED: Final = 3
"""The most micro-batches whose offloaded tensors are on a device at a time: one computes, one leaves, one returns."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class Leaving(Generic[_K, _V]):
    """The offloaded tensors that are still on a device.

    They leave it before the second computing action after their OFFLOAD, or before others are loaded for that action,
    unless their own LOAD comes first.
    """

    def __init__(self) -> None:
        self._latest: dict[_K, _V] = {}
        self._earlier: dict[_K, _V] = {}

    def add(self, key: _K, value: _V) -> None:
        """Note the tensors of an OFFLOAD."""
        self._latest[key] = value

    def keep(self, key: _K) -> bool:
        """Note a LOAD. True if its tensors are still on the device, and so stay there; otherwise call `release`."""
        return any(entries.pop(key, None) is not None for entries in (self._latest, self._earlier))

    def release(self) -> list[_V]:
        """Note that memory is needed: the tensors that leave now, those from before the latest computing action."""
        left, self._earlier = self._earlier, {}
        return list(left.values())

    def compute(self) -> list[_V]:
        """Note a computing action: the tensors that leave before it."""
        left = self.release()
        self._earlier, self._latest = self._latest, {}
        return left


def warm_up_peak(static: float, kept: float, working: float, in_flight: int, offloaded: float = 0.0) -> float:
    """Peak memory of a device with one stage and full backwards: `peak` after the warm-up and a recomputation.

    Args:
        static: permanent bytes: parameters, gradients, optimizer states.
        kept: bytes per micro-batch in flight.
        working: bytes of a recomputation.
        in_flight: micro-batches in flight.
        offloaded: further bytes per micro-batch, which lie in host memory while it waits.
    """
    return static + in_flight * kept + min(in_flight, MOST_COPIED) * offloaded + working


_PREDECESSORS: Final = {Kind.INPUT: Kind.FORWARD, Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
"""The kind of the same micro-batch's action that must end before one of a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All tasks of one mini-batch.

    Args:
        plan: the plan.
        batch_size: samples of the mini-batch.
        unsplit: stages whose backwards have no second half.
        limits: bytes that the tasks of every device may hold, besides a recomputation; empty if unknown.
        tasks: the tasks.
    """

    plan: Plan
    batch_size: int
    unsplit: frozenset[int]
    limits: tuple[float, ...]
    tasks: TaskGraph

    def loads(self) -> list[float]:
        """Seconds of every device's tasks."""
        loads = [0.0] * self.plan.num_devices
        for device, seconds in zip(self.tasks.devices, self.tasks.seconds, strict=True):
            loads[device] += seconds
        return loads

    def peaks(self, rows: DeviceOrders) -> list[float]:
        """Peak memory of every device if it follows its order."""
        takes, numbers = self.tasks.takes, self.tasks.numbers
        return [peak(takes[numbers[device, action]] for action in row) for device, row in enumerate(rows)]

    def fits(self, peaks: Sequence[float]) -> bool:
        """True if the peaks are within the memory limits, if these are known."""
        return not self.limits or all(peak <= limit for peak, limit in zip(peaks, self.limits, strict=True))

    def order(self, rows: DeviceOrders, full: Callable[[Action], bool] = lambda action: False) -> Schedule:
        """The schedule of these rows, with full backwards for stages without a second half.

        A full backward takes the place of its first half.

        Args:
            rows: the actions of every device.
            full: returns true for actions whose backward has to be full.
        """

        def joined(action: Action) -> Iterator[Action]:
            split = action.stage not in self.unsplit and not full(action.of_kind(Kind.INPUT))
            if action.kind is Kind.FORWARD or split:
                yield action
            elif action.kind is Kind.INPUT:
                yield action.of_kind(Kind.BACKWARD)

        return Schedule(tuple(tuple(new for action in row for new in joined(action)) for row in rows))


def work_of(plan: Plan, batch_size: int, *, split: bool = True, travels: bool = False) -> Work:
    """The work of one mini-batch.

    Args:
        plan: the plan.
        batch_size: samples of the mini-batch.
        split: whether backwards are split into halves.
        travels: whether messages take the seconds of the plan even if its stages have none.
    """
    figures = [stage.figures for stage in plan.stages]
    timed, unsplit = is_timed(plan), unsplit_stages(plan)
    sized = any(entry.activation_bytes != Affine() for entry in figures)
    costs = [_figures(plan, stage, timed, sized, stage not in unsplit) for stage in range(len(figures))]
    seconds: dict[Task, float] = {}
    takes: dict[Task, float] = {}
    working = [0.0 for _ in range(plan.num_devices)]
    for stage, device, number, samples in _parts(plan, batch_size):
        cost, changes = costs[stage], allocations(costs[stage], samples, recomputes=False)
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD):
            task = device, Action(stage, kind, number)
            seconds[task] = duration(cost, kind, samples) if samples else 0.0
            takes[task] = changes[kind] if samples else 0.0
        working[device] = max(working[device], cost.working_bytes.at(samples) if samples else 0.0)
    return Work(
        plan=plan,
        batch_size=batch_size,
        unsplit=unsplit,
        limits=tuple(limit - most for limit, most in zip(plan.memory_bytes, working, strict=False)) if sized else (),
        tasks=task_graph(plan, batch_size, seconds, takes, travels=timed or travels),
    )


def task_graph(
    plan: Plan,
    batch_size: int,
    seconds: Mapping[Task, float],
    takes: Mapping[Task, float] | None = None,
    *,
    training: bool = True,
    travels: bool = False,
) -> TaskGraph:
    """The tasks in the order of `seconds`, with their dependencies by messages and inside a device.

    Args:
        plan: the plan, which determines the messages.
        batch_size: samples of the mini-batch.
        seconds: duration of every task.
        takes: bytes of every task; by default no task needs memory.
        training: whether there are backwards.
        travels: whether messages take the seconds of the plan; otherwise they take none.
    """
    numbers = {task: number for number, task in enumerate(seconds)}
    missing, readers = [0 for _ in numbers], [list[tuple[int, float]]() for _ in numbers]

    def link(before: Task, after: Task, travel: float = 0.0) -> None:
        readers[numbers[before]].append((numbers[after], travel))
        missing[numbers[after]] += 1

    split = frozenset((action.stage, action.micro_batch) for _, action in numbers if action.kind is Kind.INPUT)
    for message in derive_messages(plan, batch_size, training, split):
        edge, moves = plan.edges[message.edge], travels and message.src != message.dst
        if edge.src != SOURCE:
            travel = edge.seconds.at(message.stop - message.start) if moves else 0.0
            link((message.src, message.producer), (message.dst, message.consumer), travel)
    for device, action in numbers:
        if action.kind in _PREDECESSORS:
            link((device, action.of_kind(_PREDECESSORS[action.kind])), (device, action))
    return TaskGraph(
        numbers=numbers,
        devices=[device for device, _ in numbers],
        actions=[action for _, action in numbers],
        seconds=list(seconds.values()),
        takes=[takes[task] for task in numbers] if takes is not None else [0.0] * len(numbers),
        readers=readers,
        missing=missing,
    )


def is_timed(plan: Plan) -> bool:
    """True if the plan has seconds for any stage."""
    figures = (stage.figures for stage in plan.stages)
    return any(Affine() != cost for f in figures for cost in (f.forward_seconds, f.input_seconds, f.weight_seconds))


def unsplit_stages(plan: Plan) -> frozenset[int]:
    """Stages whose backwards have no second half, because weight gradients take no time or do not exist."""
    timed = is_timed(plan)
    without = (timed and stage.figures.weight_seconds == Affine() for stage in plan.stages)
    return frozenset(stage for stage, lacks in enumerate(without) if lacks or is_extra(plan, stage))


def is_extra(plan: Plan, stage: int) -> bool:
    """True if a stage holds only the user's step and gives its device one stage more than the others.

    Such a stage has no place of its own in a V layout, takes little time, and has no parameters.
    """
    if plan.stages[stage].modules != (STEP,):
        return False
    counts = [len(plan.stages_on(device)) for device in range(plan.num_devices)]
    mine = {counts[device] for device in plan.devices_of(stage)}
    rest = [count for device, count in enumerate(counts) if device not in plan.devices_of(stage)]
    return bool(rest) and min(mine) > max(rest)


def halved(rows: DeviceOrders) -> DeviceOrders:
    """The order of every device with both halves in place of each full backward."""
    return [[half for action in row for half in _halves(action)] for row in rows]


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return action.of_kind(Kind.INPUT), action.of_kind(Kind.WEIGHT)


def turns(stage: Stage) -> int:
    """Number of replicas that take micro-batches in turn."""
    return len(stage.devices) if stage.round_robin else 1


def _parts(plan: Plan, batch_size: int) -> Iterator[tuple[int, int, int, int]]:
    """All (stage, device, micro-batch, number of samples in the device's share)."""
    for stage in range(len(plan.stages)):
        for device in plan.devices_of(stage):
            samples = samples_of(plan, stage, device, batch_size)
            for number in plan.micro_batches(stage, device, batch_size):
                yield stage, device, number, samples[number]


def _figures(plan: Plan, index: int, timed: bool, sized: bool, halves: bool) -> Figures:
    """The figures of a stage, or units. The first half of a backward includes the recomputation."""
    stage, known = plan.stages[index], plan.stages[index].figures
    unit = Affine(0 if is_extra(plan, index) else 1)
    figures = Figures(forward_seconds=unit, input_seconds=unit, weight_seconds=unit)
    if timed:
        inputs = known.forward_seconds + known.input_seconds if stage.reruns else known.input_seconds
        figures = replace(known, input_seconds=inputs)
    kept, pending, working = unit, unit, Affine()
    if sized:
        kept, pending = known.activation_bytes, known.pending_bytes
        working = known.working_bytes + known.offloaded_bytes * MOST_COPIED
    return replace(
        figures,
        activation_bytes=kept,
        offloaded_bytes=Affine(),
        working_bytes=working,
        pending_bytes=pending if halves else Affine(),
    )
