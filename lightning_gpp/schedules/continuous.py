"""Continuous programs: pipelines that never flush between mini-batches.

The order of a schedule over many mini-batches has a fill, a steady state that repeats, and a drain. One repetition is
the *period*: what a device does between two of its optimizer steps. In period t it completes mini-batch t, and already
starts mini-batches t + 1, t + 2, ...; how many depends on its distance to the sink, so a graph of stages is less far
ahead, and trains with fresher weights, than the chain of the same stages.

    1F1B, 3 stages, 2 micro-batches per mini-batch: the period of each device; ' is the next mini-batch

    stage 0   F0' B0  F1' B1        forwards 2 micro-batches ahead of backwards
    stage 1   F1  B0  F0' B1        1 ahead
    stage 2   F0  B0  F1  B1        none ahead

Fill and drain are the same period with the actions left out that belong to no mini-batch, so nothing else is needed to
start, to stop, or to flush in between. `unrolled` writes this out as an ordinary program for a few mini-batches, which
is what the verifier proves and the simulator plays.

Source: PipeDream (Narayanan et al., SOSP 2019) for the steady state of 1F1B on a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import RELEASES, Action, Kind, Schedule
from lightning_gpp.schedules.collectives import with_collectives
from lightning_gpp.schedules.lowering import lower, split_of
from lightning_gpp.schedules.messages import derive_messages
from lightning_gpp.schedules.program import Instruction, Message, Op, Program
from lightning_gpp.schedules.registry import flights, make_schedule
from lightning_gpp.schedules.verifier import verify
from lightning_gpp.slices import is_sliced

Row = tuple[tuple[Instruction, int], ...]
"""Instructions of a device, and the mini-batch of each: its number, or in a period by how many it is ahead."""

_FOR_UPDATE: Final = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
"""Kinds of actions that make, or help to make, gradients of parameters."""

_SETTLED: Final = 3
"""Periods of the steady state that are compared."""


def continuous_program(plan: Plan, batch_size: int | None = None, *, num_pipelines: int = 1) -> Program:
    """The period of the plan's schedule, verified for any number of mini-batches.

    Args:
        plan: names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        num_pipelines: copies of the pipeline, which sum their gradients.

    Raises:
        ScheduleError: the schedule has no steady state, or micro-batches do not divide the mini-batch.
    """
    total = plan.batch_size if batch_size is None else batch_size
    _check(plan, total)
    rows = _periods(plan, total)
    replicated = {i for i, stage in enumerate(plan.stages) if len(stage.devices) * num_pipelines > 1}
    program = assembled(plan, total, _with_sums(plan, rows, replicated))
    prove(program)
    return program


def unrolled(program: Program, num_batches: int) -> Program:
    """The program of `num_batches` mini-batches, from an empty pipeline to an empty pipeline, as one that flushes."""
    return _Unrolling(program, num_batches).program()


def forwards_ahead(program: Program) -> dict[Action, int]:
    """For every forward by how many mini-batches it is ahead of its backward, in the steady state."""
    return {
        instruction.action: program.ahead[device][position] if program.ahead else 0
        for device, instructions in enumerate(program.devices)
        for position, instruction in enumerate(instructions)
        if instruction.action is not None and instruction.action.kind is Kind.FORWARD
    }


def delays_of(program: Program) -> dict[int, int]:
    """For every stage the largest number of updates between a forward and its backward, in the steady state."""
    delays: dict[int, int] = {}
    for action, ahead in forwards_ahead(program).items():
        delays[action.stage] = max(delays.get(action.stage, 0), ahead)
    return dict(sorted(delays.items()))


def prove(program: Program) -> None:
    """Verify a continuous program for any number of mini-batches.

    Every number up to that at which fill and drain no longer overlap is proven, and then one more: from there on,
    another mini-batch adds a period between two equal states.

    Raises:
        VerificationError: see `verify`.
    """
    most: dict[int, int] = {}
    for number in range(1, program.lead + 3):
        written_out = unrolled(program, number)
        counts = flights(Schedule(tuple(_actions(row) for row in written_out.devices)))
        verify(written_out, counts)
        if number > program.lead + 1 and any(counts[stage] > most[stage] for stage in counts):
            raise ScheduleError("A continuous program holds more micro-batches with every mini-batch.")
        most = counts


def _actions(row: Sequence[Instruction]) -> tuple[Action, ...]:
    return tuple(instruction.action for instruction in row if instruction.action is not None)


def _check(plan: Plan, total: int) -> None:
    for stage in plan.stages:
        if stage.round_robin and total % (stage.micro_batch_size * len(stage.devices)):
            raise ScheduleError(
                f"Stage {stage.name!r} has {len(stage.devices)} replicas that take micro-batches of "
                f"{stage.micro_batch_size} samples in turn: without a flush each must take the same number of them, "
                f"which a mini-batch of {total} samples does not allow. Choose strategy.micro_batch_size so that all "
                "replicas get equally many."
            )
    if is_sliced(plan):
        raise ScheduleError(
            "Slices of sequences (strategy.slices) need a flush after every mini-batch. Remove strategy.slices, or use "
            "strategy.weights=synchronous."
        )
    if plan.sharding == "fsdp":
        raise ScheduleError(
            "strategy.sharding=fsdp gathers parameters for one mini-batch at a time, and a pipeline that does not flush"
            " works on several. Use strategy.sharding=zero1 or none, or strategy.weights=synchronous."
        )


# -- the period -------------------------------------------------------------------------------------------------------


def _periods(plan: Plan, total: int) -> list[Row]:
    """The instructions of every device between two optimizer steps, once the pipeline is full."""
    number = 2 * _SETTLED
    while number <= 4 * (plan.depth + _SETTLED):
        try:
            return [_steady(row, number) for row in _many(plan, total, number)]
        except _Unsettled:
            number *= 2
    raise ScheduleError(
        f"strategy.schedule={plan.schedule} does not settle into a period that repeats with every mini-batch of {total}"
        " samples, so it cannot run without a flush. Use strategy.schedule=1f1b, or strategy.weights=synchronous."
    )


class _Unsettled(Exception):
    """The order does not repeat yet."""


def _many(plan: Plan, total: int, number: int) -> list[Row]:
    """For every device its instructions for `number` mini-batches in a row, and of which mini-batch each is."""
    plan = replace(plan, period=total)
    found = make_schedule(plan, number * total)
    schedule = Schedule(tuple(tuple(_by_update(row, plan, total)) for row in found.devices))
    program = lower(plan, schedule, number * total)
    period = {_ends(message, plan, total)[0]: message.id for message in _messages(plan, total, schedule)}
    rows = []
    for instructions in program.devices:
        row = []
        for instruction in instructions:
            if instruction.action is not None:
                action, batch = _local(instruction.action, plan, total)
                row.append((Instruction(Op.COMPUTE, action=action), batch))
            elif instruction.message is not None:
                ends, batch = _ends(program.messages[instruction.message], plan, total)
                row.append((Instruction(instruction.op, message=period[ends]), batch))
        rows.append(tuple(row))
    return rows


def _by_update(row: Sequence[Action], plan: Plan, total: int) -> Iterator[Action]:
    """The row with every backward behind those of all earlier mini-batches: an optimizer step comes in between.

    Devices with one stage have that order anyway.
    """
    left = Counter(_local(action, plan, total)[1] for action in row if action.kind in _FOR_UPDATE)
    current, held = 0, list[Action]()
    for action in row:
        if action.kind in _FOR_UPDATE and _local(action, plan, total)[1] > current:
            held.append(action)
            continue
        yield action
        left[current] -= action.kind in _FOR_UPDATE
        while held and not left[current]:
            current += 1
            free = [action for action in held if _local(action, plan, total)[1] == current]
            held = [action for action in held if action not in free]
            left[current] -= len(free)
            yield from free
        current += not left[current]


def _messages(plan: Plan, total: int, schedule: Schedule) -> tuple[Message, ...]:
    split = frozenset((stage, number) for stage, number in split_of(schedule) if number < _count(plan, stage, total))
    return derive_messages(plan, total, training=True, split=split)


def _count(plan: Plan, stage: int, total: int) -> int:
    return len(plan.intervals(stage, total))


def _local(action: Action, plan: Plan, total: int) -> tuple[Action, int]:
    """The action with its number inside its mini-batch, and the number of the mini-batch."""
    batch, number = divmod(action.micro_batch, _count(plan, action.stage, total))
    return action._replace(micro_batch=number), batch


def _ends(message: Message, plan: Plan, total: int) -> tuple[tuple[object, ...], int]:
    """The identity of a message among those of its mini-batch, and the number of the mini-batch."""
    producer, batch = _local(message.producer, plan, total)
    consumer, _ = _local(message.consumer, plan, total)
    return (message.edge, message.gradient, message.src, producer, message.dst, consumer), batch


def _steady(row: Row, number: int) -> Row:
    """The period that the middle of a device's row repeats; the row says of which mini-batch each instruction is."""
    ends = _period_ends(row, number)
    middle = range(number // 2, number // 2 + _SETTLED)
    found = [tuple((what, batch - t) for what, batch in row[ends[t - 1] : ends[t]]) for t in middle]
    repeats = all(period == found[0] for period in found) and all(_in_place(what, ahead) for what, ahead in found[0])
    complete = Counter(what for what, _ in found[0]) == Counter({what for what, _ in row})
    if not (repeats and complete):
        raise _Unsettled
    return found[0]


def _in_place(instruction: Instruction, ahead: int) -> bool:
    """True if nothing is late, and no gradient arrives early, which the next optimizer step would use."""
    action = instruction.action
    return ahead == 0 if action is not None and action.kind in _FOR_UPDATE else ahead >= 0


def _period_ends(row: Row, number: int) -> list[int]:
    """For every mini-batch the number of instructions up to the last that its backwards need, sends included."""
    ends = [0] * number
    for position, (instruction, batch) in enumerate(row):
        if instruction.action is not None and instruction.action.kind in RELEASES:
            ends[batch] = position + 1
    return [_with_sends(row, end) for end in ends]


def _with_sends(row: Row, end: int) -> int:
    while end < len(row) and row[end][0].op is Op.SEND:
        end += 1
    return end


def _with_sums(plan: Plan, rows: Sequence[Row], replicated: set[int]) -> list[Row]:
    """Sum gradients over replicas after the last backward of a stage in each period."""
    schedule = Schedule(tuple(_actions([instruction for instruction, _ in row]) for row in rows))
    summed = with_collectives(plan, schedule, replicated)
    return [tuple(_woven(row, actions)) for row, actions in zip(rows, summed.devices, strict=True)]


def _woven(row: Row, actions: Sequence[Action]) -> Iterator[tuple[Instruction, int]]:
    """The row with the sums that `actions` has besides; each goes behind the sends of the action before it."""
    waiting = list(actions)
    for index, (instruction, ahead) in enumerate(row):
        if instruction.op is not Op.SEND:
            yield from _sums(waiting)
        if instruction.action is not None:
            waiting.pop(0)
        yield instruction, ahead
        if index == len(row) - 1:
            yield from _sums(waiting)


def _sums(waiting: list[Action]) -> Iterator[tuple[Instruction, int]]:
    while waiting and waiting[0].kind is Kind.REDUCE:
        yield Instruction(Op.COMPUTE, action=waiting.pop(0)), 0


def assembled(plan: Plan, total: int, rows: Sequence[Row]) -> Program:
    """The program whose devices repeat these rows."""
    devices = tuple(tuple(instruction for instruction, _ in row) for row in rows)
    schedule = Schedule(tuple(_actions(row) for row in devices))
    messages = _messages(plan, total, schedule)
    inputs: dict[tuple[int, Action], list[int]] = {
        (device, action): [] for device, actions in enumerate(schedule.devices) for action in actions
    }
    outputs = {task: list[int]() for task in inputs}
    for message in messages:
        inputs[message.dst, message.consumer].append(message.id)
        outputs[message.src, message.producer].append(message.id)
    return Program(
        plan=plan,
        batch_size=total,
        training=True,
        messages=messages,
        devices=devices,
        inputs={task: tuple(ids) for task, ids in inputs.items()},
        outputs={task: tuple(ids) for task, ids in outputs.items()},
        split=split_of(schedule),
        reduced=frozenset(a.stage for actions in schedule.devices for a in actions if a.kind is Kind.REDUCE),
        ahead=tuple(tuple(ahead for _, ahead in row) for row in rows),
    )


# -- written out ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unrolling:
    """Writes out the first `number` mini-batches of a continuous program; each has ids and micro-batches of its own."""

    base: Program
    number: int

    def program(self) -> Program:
        base, total = self.base, self.base.batch_size * self.number
        return replace(
            base,
            plan=replace(base.plan, batch_size=total, period=base.batch_size),
            batch_size=total,
            messages=tuple(self._message(message, batch) for batch in self._batches for message in base.messages),
            devices=tuple(tuple(self._row(device)) for device in range(len(base.devices))),
            inputs=self._links(base.inputs),
            outputs=self._links(base.outputs),
            split=frozenset(
                (stage, number + batch * _count(base.plan, stage, base.batch_size))
                for stage, number in base.split
                for batch in self._batches
            ),
            ahead=(),
        )

    @property
    def _batches(self) -> range:
        return range(self.number)

    def _row(self, device: int) -> Iterator[Instruction]:
        lead, instructions = self.base.lead_of(device), self.base.devices[device]
        row = self.base.ahead[device] if self.base.ahead else (0,) * len(instructions)
        for period in range(-lead, self.number):
            for instruction, ahead in zip(instructions, row, strict=True):
                if 0 <= period + ahead < self.number:
                    yield self._instruction(instruction, period + ahead)

    def _instruction(self, instruction: Instruction, batch: int) -> Instruction:
        if instruction.action is not None:
            return replace(instruction, action=self._action(instruction.action, batch))
        assert instruction.message is not None
        return replace(instruction, message=instruction.message + batch * len(self.base.messages))

    def _action(self, action: Action, batch: int) -> Action:
        count = 1 if action.kind is Kind.REDUCE else _count(self.base.plan, action.stage, self.base.batch_size)
        return action._replace(micro_batch=action.micro_batch + batch * count)

    def _message(self, message: Message, batch: int) -> Message:
        shift = batch * self.base.batch_size
        return replace(
            message,
            id=message.id + batch * len(self.base.messages),
            start=message.start + shift,
            stop=message.stop + shift,
            producer=self._action(message.producer, batch),
            consumer=self._action(message.consumer, batch),
        )

    def _links(self, links: dict[tuple[int, Action], tuple[int, ...]]) -> dict[tuple[int, Action], tuple[int, ...]]:
        shift = len(self.base.messages)
        return {
            (device, self._action(action, batch)): tuple(number + batch * shift for number in numbers)
            for batch in self._batches
            for (device, action), numbers in links.items()
        }
