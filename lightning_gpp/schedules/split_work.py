"""What forwards and both halves of backwards of a plan take, keep and wait for, for schedules that order split ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Figures, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.merge import Task
from lightning_gpp.schedules.messages import derive_messages, samples_of

Rows = Sequence[Sequence[Action]]
"""For every device its actions, in order."""

_KINDS: Final = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)

_MAKERS: Final = {Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
"""What comes before an action of a kind, of the same micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWork:
    """All tasks of one mini-batch, every backward split.

    Args:
        plan: what it is the work of.
        batch_size: samples of the mini-batch.
        timed: whether the plan knows seconds; a sample takes one unit per action otherwise.
        seconds: of every task.
        kept: by forward, bytes from it to the gradients of the inputs; samples where the plan knows no bytes.
        pending: by forward, what is left of that until the gradients of the parameters are there.
        readers: for every task those that wait for it, and the seconds that its message is on its way.
        missing: for every task the number of those that it waits for.
    """

    plan: Plan
    batch_size: int
    timed: bool
    seconds: Mapping[Task, float]
    kept: Mapping[Task, float]
    pending: Mapping[Task, float]
    readers: Mapping[Task, Sequence[tuple[Task, float]]]
    missing: Mapping[Task, int]

    def order(self, rows: Rows, whole: Callable[[Action], bool] = lambda action: False) -> Schedule:
        """The order with whole backwards where `whole` says so of their first halves, and where the other is empty.

        A whole backward takes the place of its first half.
        """
        empty = {
            index
            for index, stage in enumerate(self.plan.stages)
            if is_extra(self.plan, index)
            or (stage.figures.input_seconds != Affine() and stage.figures.weight_seconds == Affine())
        }

        def joined(action: Action) -> Iterator[Action]:
            split = action.stage not in empty and not whole(action._replace(kind=Kind.INPUT))
            if action.kind is Kind.FORWARD or split:
                yield action
            elif action.kind is Kind.INPUT:
                yield action._replace(kind=Kind.BACKWARD)

        return Schedule(tuple(tuple(found for action in row for found in joined(action)) for row in rows))


def split_work(plan: Plan, batch_size: int) -> SplitWork:
    """The work of one mini-batch."""
    seconds: dict[Task, float] = {}
    kept: dict[Task, float] = {}
    pending: dict[Task, float] = {}
    timed = any(_timed(stage.figures) for stage in plan.stages)
    sized = any(stage.figures.activation_bytes != Affine() for stage in plan.stages)
    for stage, device, number, samples in _parts(plan, batch_size):
        forward = device, Action(stage, Kind.FORWARD, number)
        for kind, cost in zip(_KINDS, _costs(plan, stage, timed), strict=True):
            seconds[device, Action(stage, kind, number)] = cost.at(samples) if samples else 0.0
        size, left = _bytes(plan, stage, sized)
        kept[forward] = size.at(samples) if samples else 0.0
        pending[forward] = min(kept[forward], left.at(samples))
    readers, missing = _links(plan, batch_size, seconds, timed)
    return SplitWork(
        plan=plan,
        batch_size=batch_size,
        timed=timed,
        seconds=seconds,
        kept=kept,
        pending=pending,
        readers=readers,
        missing=missing,
    )


def is_extra(plan: Plan, stage: int) -> bool:
    """Whether a stage is nothing but the user's step, on a device that holds more stages than others for its sake.

    Then it has no place of its own in a V, takes little time, and has no parameters.
    """
    if plan.stages[stage].modules != (STEP,):
        return False
    counts = [len(plan.stages_on(device)) for device in range(plan.num_devices)]
    mine = {counts[device] for device in plan.devices_of(stage)}
    rest = [count for device, count in enumerate(counts) if device not in plan.devices_of(stage)]
    return bool(rest) and min(mine) > max(rest)


def _parts(plan: Plan, batch_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Stage, device, micro-batch, and the samples of the device's share; 0 where it gets none."""
    for device in range(plan.num_devices):
        for stage in plan.stages_on(device):
            samples = samples_of(plan, stage, device, batch_size)
            for number in plan.micro_batches(stage, device, batch_size):
                yield stage, device, number, samples[number]


def _timed(figures: Figures) -> bool:
    return any(cost != Affine() for cost in (figures.forward_seconds, figures.input_seconds, figures.weight_seconds))


def _costs(plan: Plan, stage: int, timed: bool) -> tuple[Affine, Affine, Affine]:
    """Seconds of a forward and of both halves of a backward, the first with the forward again where it is repeated."""
    if not timed:
        return (_unit(plan, stage),) * 3
    figures = plan.stages[stage].figures
    again = figures.forward_seconds if plan.stages[stage].recompute else Affine()
    return figures.forward_seconds, again + figures.input_seconds, figures.weight_seconds


def _unit(plan: Plan, stage: int) -> Affine:
    """One for a sample; nothing for the user's step alone."""
    return Affine(0 if is_extra(plan, stage) else 1)


def _bytes(plan: Plan, stage: int, sized: bool) -> tuple[Affine, Affine]:
    """Kept until the gradients of the inputs, and from there on; of a recomputed stage the inputs alone."""
    if not sized:
        return (_unit(plan, stage),) * 2
    figures = plan.stages[stage].figures
    if not plan.stages[stage].recompute:
        return figures.activation_bytes, figures.pending_bytes
    received = sum((edge.bytes for edge in plan.edges if edge.dst == stage), Affine())
    return received, figures.pending_bytes


def _links(
    plan: Plan, batch_size: int, tasks: Mapping[Task, float], timed: bool
) -> tuple[dict[Task, list[tuple[Task, float]]], dict[Task, int]]:
    readers: dict[Task, list[tuple[Task, float]]] = defaultdict(list)
    missing: dict[Task, int] = defaultdict(int)
    split = frozenset((action.stage, action.micro_batch) for _, action in tasks)
    for message in derive_messages(plan, batch_size, True, split):
        edge = plan.edges[message.edge]
        if edge.src != SOURCE:
            travel = edge.seconds.at(message.stop - message.start) if timed and message.src != message.dst else 0.0
            readers[message.src, message.producer].append(((message.dst, message.consumer), travel))
            missing[message.dst, message.consumer] += 1
    for device, action in tasks:
        if action.kind in _MAKERS:
            readers[device, action._replace(kind=_MAKERS[action.kind])].append(((device, action), 0.0))
            missing[device, action] += 1
    return readers, missing
