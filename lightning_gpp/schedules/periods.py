"""Finds the period of an order, a repetition of its steady state, in the order of many consecutive mini-batches.

The row of a device is written out with all its messages, and cut into one piece for each mini-batch. Pieces in the
middle are equal if each instruction is labelled with the mini-batches by which it is ahead; such a piece is the period.

Inference streams forwards of mini-batch after mini-batch, without a bubble in between. Nothing comes back from the
sink, so devices wait only for data. The order of forwards follows from their nominal times: one sample leaves the
source per unit of time, and a stage starts on a micro-batch after the time that its inputs need to be computed and
sent. All periods end when the sink ends a mini-batch.

    4 stages, 2 micro-batches per mini-batch; ' is the next mini-batch

    stage 0   F0''' F1'''
    stage 1   F0''  F1''        messages take as long as a forward, so that neighbours are two micro-batches apart
    stage 2   F0'   F1'
    stage 3   F0    F1
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import RELEASES, Action, Kind, Schedule
from lightning_gpp.schedules.lowering import derive_messages, lower, reads_data, required_actions, split_of
from lightning_gpp.schedules.program import Instruction, Message, Op

Row = tuple[tuple[Instruction, int], ...]
"""Instructions of a device, each with the number of its mini-batch or, in a period, the number by which it is ahead."""

FOR_UPDATE: Final = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
"""Kinds of actions that contribute to gradients of parameters."""

SETTLED: Final = 3
"""Number of periods of the steady state to compare."""


class Unsettled(Exception):
    """The order does not repeat yet."""


def local(action: Action, plan: Plan, total: int) -> tuple[Action, int]:
    """The action with its number inside its mini-batch, and the number of the mini-batch."""
    batch, number = divmod(action.micro_batch, len(plan.intervals(action.stage, total)))
    return action.at(number), batch


def messages_of(plan: Plan, total: int, schedule: Schedule, training: bool) -> tuple[Message, ...]:
    """The messages of one mini-batch; the schedule may be for several."""
    split = frozenset(
        (stage, number) for stage, number in split_of(schedule) if number < len(plan.intervals(stage, total))
    )
    return derive_messages(plan, total, training, split=split)


def written_out(plan: Plan, total: int, schedule: Schedule, number: int, training: bool) -> list[Row]:
    """The instructions of every device for `number` consecutive mini-batches, each with the number of its mini-batch.

    Args:
        plan: the plan, with the samples of a mini-batch as `period`.
        total: samples of a mini-batch.
        schedule: the order of all mini-batches.
        number: number of mini-batches.
        training: whether there are backwards.

    Raises:
        Unsettled: a message is not one of every mini-batch, because the order splits only some of their backwards.
    """
    program = lower(plan, schedule, number * total, training)
    period = {_ends(message, plan, total)[0]: message.id for message in messages_of(plan, total, schedule, training)}
    numbered = [(period.get(ends), batch) for ends, batch in (_ends(each, plan, total) for each in program.messages)]
    rows = []
    for instructions in program.devices:
        row = []
        for instruction in instructions:
            if instruction.action is not None:
                action, batch = local(instruction.action, plan, total)
                row.append((Instruction(Op.COMPUTE, action=action), batch))
            elif instruction.message is not None:
                message, batch = numbered[instruction.message]
                if message is None:
                    raise Unsettled
                row.append((Instruction(instruction.op, message=message), batch))
        rows.append(tuple(row))
    return rows


def _ends(message: Message, plan: Plan, total: int) -> tuple[tuple[object, ...], int]:
    """The identity of a message among those of its mini-batch, and the number of the mini-batch."""
    producer, batch = local(message.producer, plan, total)
    consumer, _ = local(message.consumer, plan, total)
    return (message.edge, message.gradient, message.src, producer, message.dst, consumer), batch


def by_update(row: Sequence[Action], plan: Plan, total: int) -> Iterator[Action]:
    """The row with every backward behind those of all earlier mini-batches, because an optimizer step comes in between.

    Weight gradients that would come too late are computed earlier; on devices with several stages, backwards may have
    to wait.
    """
    left = Counter(local(action, plan, total)[1] for action in row if action.kind in FOR_UPDATE)
    current, held = 0, list[Action]()
    for action in _weights_in_time(row, plan, total):
        if action.kind in FOR_UPDATE and local(action, plan, total)[1] > current:
            held.append(action)
            continue
        yield action
        left[current] -= action.kind in FOR_UPDATE
        while held and not left[current]:
            current += 1
            free = [action for action in held if local(action, plan, total)[1] == current]
            held = [action for action in held if action not in free]
            left[current] -= len(free)
            yield from free
        current += not left[current]


def _weights_in_time(row: Sequence[Action], plan: Plan, total: int) -> Iterator[Action]:
    """The row with the weight gradients of a mini-batch no later than right after its last input gradients.

    With a flush they fill the bubble at the end; without one there is no bubble, and the later the optimizer steps, the
    older are the weights of the forwards before it.
    """
    left = Counter(local(action, plan, total)[1] for action in row if action.kind is Kind.INPUT)
    late = [action for action in row if action.kind is Kind.WEIGHT]
    done = set[Action]()
    for action in row:
        if action in done:
            continue
        yield action
        done.add(action)
        batch = local(action, plan, total)[1]
        left[batch] -= action.kind is Kind.INPUT
        if action.kind is Kind.INPUT and not left[batch]:
            due = [weight for weight in late if local(weight, plan, total)[1] == batch and weight not in done]
            yield from due
            done.update(due)


def after_backwards(row: Row, number: int) -> list[int]:
    """Number of instructions up to the last that the backwards of each mini-batch need, sends included."""
    ends = [0] * number
    for position, (instruction, batch) in enumerate(row):
        if instruction.action is not None and instruction.action.kind in RELEASES:
            ends[batch] = position + 1
    return [with_sends(row, end) for end in ends]


def with_sends(row: Row, end: int) -> int:
    """The position after the sends that follow an instruction."""
    while end < len(row) and row[end][0].op is Op.SEND:
        end += 1
    return end


def settled(
    first: int, most: int, written: Callable[[int], list[Row]], ends: Callable[[Row, int], Sequence[int]]
) -> list[Row]:
    """The periods of all devices, from the order of as few mini-batches as it takes until it repeats.

    Args:
        first: number of mini-batches to begin with, which is doubled as long as the order does not repeat.
        most: limit of that number.
        written: returns the rows of a number of mini-batches.
        ends: returns the ends of a row's periods, see `steady`.

    Raises:
        Unsettled: the order does not repeat.
    """
    number = first
    while number <= most:
        with suppress(Unsettled):
            return [steady(row, ends(row, number)) for row in written(number)]
        number *= 2
    raise Unsettled


def steady(row: Row, ends: Sequence[int]) -> Row:
    """The period that the middle of a device's row repeats.

    Args:
        row: instructions, each with the number of its mini-batch.
        ends: number of instructions up to the end of each mini-batch's period.

    Raises:
        Unsettled: the row does not repeat.
    """
    start = (len(ends) - SETTLED) // 2  # far from the fill and from the drain
    middle = range(start, start + SETTLED)
    found = [tuple((what, batch - t) for what, batch in row[ends[t - 1] : ends[t]]) for t in middle]
    repeats = all(period == found[0] for period in found) and all(_in_place(what, ahead) for what, ahead in found[0])
    complete = Counter(what for what, _ in found[0]) == Counter({what for what, _ in row})
    if not (repeats and complete):
        raise Unsettled
    return found[0]


def _in_place(instruction: Instruction, ahead: int) -> bool:
    """True if nothing is late, and no gradient arrives so early that the next optimizer step would use it."""
    action = instruction.action
    return ahead == 0 if action is not None and action.kind in FOR_UPDATE else ahead >= 0


def streaming_period(plan: Plan, total: int) -> list[Row]:
    """The instructions of every device between the ends of two mini-batches of `total` samples.

    Raises:
        Unsettled: the order does not repeat.
    """
    times = _Turns(plan, total)
    many = replace(plan, period=total)

    def written(number: int) -> list[Row]:
        schedule = Schedule(tuple(_order(many, times, device, number) for device in range(plan.num_devices)))
        return written_out(many, total, schedule, number, training=False)

    number = 2 * (times.lead + SETTLED + 1)
    return settled(number, 8 * number, written, lambda row, number: _ends_by_time(row, times, number))


@dataclass(slots=True)
class _Turns:
    """Nominal times of forwards and data actions, in samples of the mini-batch that leave the source.

    Attributes:
        end: the time at which the actions of the first mini-batch have started.
        lead: the most mini-batches by which an action is ahead of that.
    """

    plan: Plan
    total: int
    end: float = field(init=False)
    lead: int = field(init=False)
    _offsets: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._offsets = _offsets(self.plan, self.total)
        stages = [SOURCE] * reads_data(self.plan) + list(range(len(self.plan.stages)))
        starts = [self._offsets[stage] + self.plan.intervals(stage, self.total)[-1][0] for stage in stages]
        self.end = max(starts)
        self.lead = int(self.end // self.total)

    def of(self, action: Action, batch: int) -> float:
        """The time at which an action, numbered inside its mini-batch, starts."""
        stage = SOURCE if action.kind is Kind.DATA else action.stage
        start, _ = self.plan.intervals(stage, self.total)[action.micro_batch]
        return batch * self.total + start + self._offsets[stage]


def _offsets(plan: Plan, total: int) -> dict[int, float]:
    """The time between a sample's turn at the source and its turn at every stage, from longest paths."""
    offsets: dict[int, float] = dict.fromkeys((SOURCE, *range(len(plan.stages))), 0.0)
    messages = derive_messages(plan, total, training=False)
    for message in sorted(messages, key=lambda message: plan.edges[message.edge].dst):
        edge = plan.edges[message.edge]
        offsets[edge.dst] = max(offsets[edge.dst], offsets[edge.src] + _gap(plan, total, message))
    return offsets


def _gap(plan: Plan, total: int, message: Message) -> float:
    """Time between the turns at the ends of a message, in which the producer ends and the message travels.

    Both take as long as they have samples; data take no time.
    """
    edge = plan.edges[message.edge]
    begin, end = plan.intervals(edge.src, total)[message.producer.micro_batch]
    reads, _ = plan.intervals(edge.dst, total)[message.consumer.micro_batch]
    travels = message.stop - message.start if message.src != message.dst else 0
    return (begin if edge.src == SOURCE else end) + travels - reads


def _order(plan: Plan, times: _Turns, device: int, number: int) -> tuple[Action, ...]:
    """The actions of a device in `number` mini-batches by time.

    At equal times, the earlier mini-batch comes first, and inside a mini-batch actions whose results others read.
    """

    def key(action: Action) -> tuple[float, ...]:
        here, batch = local(action, plan, times.total)
        return times.of(here, batch), batch, -1 if action.kind is Kind.DATA else action.stage, here.micro_batch

    return tuple(sorted(required_actions(plan, device, number * times.total, training=False), key=key))


def _ends_by_time(row: Row, times: _Turns, number: int) -> list[int]:
    """Number of instructions before the first action that starts after the end of each mini-batch."""
    places = [(times.of(what.action, batch), index) for index, (what, batch) in enumerate(row) if what.action]
    starts = [time for time, _ in places]
    counts = [bisect_right(starts, times.end + batch * times.total) for batch in range(number)]
    return [with_sends(row, places[count - 1][1] + 1) if count else 0 for count in counts]
