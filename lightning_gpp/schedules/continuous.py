"""Continuous programs: pipelines that never flush between mini-batches.

The order of a schedule over many mini-batches has a fill, a steady state that repeats, and a drain. One repetition is
the *period*: the work of a device between two of its optimizer steps. In period t it completes mini-batch t, and
already starts mini-batches t + 1, t + 2, ...; their number depends on its distance to the sink, so a graph of stages is
less far ahead, and trains with newer weights, than the chain of the same stages.

    1F1B, 3 stages, 2 micro-batches per mini-batch: the period of each device; ' is the next mini-batch

    stage 0   F0' B0  F1' B1        forwards 2 micro-batches ahead of backwards
    stage 1   F1  B0  F0' B1        1 ahead
    stage 2   F0  B0  F1  B1        none ahead

Fill and drain are the same period without actions that belong to no mini-batch, so nothing else is needed to start, to
stop, or to flush in between. `unrolled` writes this out as an ordinary program for a few mini-batches, which the
verifier checks and the simulator runs. Inference streams in the same way (`periods.py`).

Source: PipeDream (Narayanan et al., SOSP 2019) for the steady state of 1F1B on a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lowering import actions_of, program_of
from lightning_gpp.schedules.passes import with_collectives
from lightning_gpp.schedules.periods import (
    SETTLED,
    Row,
    Unsettled,
    after_backwards,
    by_update,
    messages_of,
    settled,
    streaming_period,
    written_out,
)
from lightning_gpp.schedules.program import Instruction, Message, Op, Program
from lightning_gpp.schedules.registry import flights, make_schedule
from lightning_gpp.schedules.verifier import verify


def continuous_program(plan: Plan, batch_size: int | None = None, *, num_pipelines: int = 1) -> Program:
    """The period of training under the plan's schedule, verified for any number of mini-batches.

    Args:
        plan: the plan, which names the schedule.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        num_pipelines: number of pipeline replicas, which reduce their gradients.

    Raises:
        ScheduleError: the schedule has no steady state, or micro-batches do not divide the mini-batch.
    """
    total = plan.batch_size if batch_size is None else batch_size
    check_continuous(plan, total)
    rows = _training_period(plan, total)
    replicated = {i for i, stage in enumerate(plan.stages) if len(stage.devices) * num_pipelines > 1}
    program = assembled(plan, total, _with_sums(plan, rows, replicated))
    prove(program)
    return program


def streaming_program(plan: Plan, batch_size: int | None = None) -> Program:
    """The period of inference, verified for any number of mini-batches. It is the same for all schedules.

    Args:
        plan: the plan of the evaluation step.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.

    Raises:
        ScheduleError: stages are slices or sharded, micro-batches do not divide the mini-batch, or nothing repeats.
    """
    total = plan.batch_size if batch_size is None else batch_size
    check_continuous(plan, total)
    try:
        period = streaming_period(plan, total)
    except Unsettled:
        raise ScheduleError(
            f"The forwards of these stages do not settle into a period that repeats with every mini-batch of {total} "
            "samples, so evaluation cannot run without a flush. Use strategy.streaming=false."
        ) from None
    program = assembled(plan, total, period, training=False)
    prove(program)
    return program


def check_continuous(plan: Plan, total: int) -> None:
    """Raise ScheduleError if mini-batches of `total` samples need a flush after each."""
    for stage in plan.stages:
        if stage.round_robin and total % (stage.micro_batch_size * len(stage.devices)):
            raise ScheduleError(
                f"Stage {stage.name!r} has {len(stage.devices)} replicas that take micro-batches of "
                f"{stage.micro_batch_size} samples in turn: without a flush each must take the same number of them, "
                f"which a mini-batch of {total} samples does not allow. Choose a strategy.micro_batch_size with which "
                "all replicas get equally many."
            )
    if plan.is_sliced:
        raise ScheduleError(
            "Slices of sequences (strategy.slices) need a flush after every mini-batch. Remove strategy.slices, or "
            "flush (strategy.weights=synchronous; in evaluation strategy.streaming=false)."
        )
    if plan.sharding == "fsdp":
        raise ScheduleError(
            "strategy.sharding=fsdp unshards parameters for one mini-batch at a time, but a pipeline that does not "
            "flush works on several. Use strategy.sharding=zero1 or none, or flush (strategy.weights=synchronous; in "
            "evaluation strategy.streaming=false)."
        )


def unrolled(program: Program, num_batches: int) -> Program:
    """The program of `num_batches` mini-batches, from an empty pipeline to an empty one, as a program that flushes."""
    return _Unrolling(program, num_batches).program()


def forwards_ahead(program: Program) -> dict[Action, int]:
    """Number of mini-batches by which every forward is ahead of its backward, in the steady state."""
    return {
        instruction.action: ahead
        for device, instructions in enumerate(program.devices)
        for instruction, ahead in zip(instructions, program.ahead_of(device), strict=True)
        if instruction.action is not None and instruction.action.kind is Kind.FORWARD
    }


def delays_of(program: Program) -> dict[int, int]:
    """The largest number of updates between a forward and its backward on every stage, in the steady state."""
    delays: dict[int, int] = {}
    for action, ahead in forwards_ahead(program).items():
        delays[action.stage] = max(delays.get(action.stage, 0), ahead)
    return dict(sorted(delays.items()))


def prove(program: Program) -> None:
    """Verify a continuous program for any number of mini-batches.

    Every number is verified up to the one at which fill and drain no longer overlap, and then one more: from there on,
    another mini-batch adds a period between two equal states.

    Raises:
        VerificationError: see `verify`.
    """
    most: dict[int, int] = {}
    for number in range(1, program.lead + 3):
        several = unrolled(program, number)
        counts = flights([*map(actions_of, several.devices)]) if program.training else {}
        verify(several, counts)
        if number > program.lead + 1 and any(counts[stage] > most[stage] for stage in counts):
            raise ScheduleError("A continuous program holds more micro-batches with every mini-batch.")
        most = counts


def _training_period(plan: Plan, total: int) -> list[Row]:
    """The instructions of every device between two optimizer steps, once the pipeline is full."""
    try:
        return settled(2 * SETTLED, 4 * (plan.depth + SETTLED), partial(_many, plan, total), after_backwards)
    except Unsettled:
        raise ScheduleError(
            f"strategy.schedule={plan.schedule} does not settle into a period that repeats with every mini-batch of "
            f"{total} samples, so it cannot run without a flush. Use strategy.schedule=1f1b."
        ) from None


def _many(plan: Plan, total: int, number: int) -> list[Row]:
    plan = replace(plan, period=total)
    found = make_schedule(_held_back(plan), number * total)
    schedule = Schedule(tuple(tuple(by_update(row, plan, total)) for row in found.devices))
    return written_out(plan, total, schedule, number, training=True)


def _held_back(plan: Plan) -> Plan:
    """The plan with gradients on all edges: without them a stage that is not trained would run ahead without limit."""
    return replace(plan, edges=tuple(replace(edge, differentiable=True) for edge in plan.edges))


def _with_sums(plan: Plan, rows: Sequence[Row], replicated: set[int]) -> list[Row]:
    """Insert reductions of gradients after the last backward of a stage in each period."""
    schedule = Schedule(tuple(actions_of([instruction for instruction, _ in row]) for row in rows))
    summed = with_collectives(plan, schedule, replicated)
    return [tuple(_woven(row, actions)) for row, actions in zip(rows, summed.devices, strict=True)]


def _woven(row: Row, actions: Sequence[Action]) -> Iterator[tuple[Instruction, int]]:
    """The row with the additional reductions of `actions`; each goes behind the sends of the action before it."""
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


def assembled(plan: Plan, total: int, rows: Sequence[Row], *, training: bool = True) -> Program:
    """The program whose devices repeat these rows."""
    devices = [tuple(instruction for instruction, _ in row) for row in rows]
    messages = messages_of(plan, total, Schedule(tuple(map(actions_of, devices))), training)
    ahead = tuple(tuple(ahead for _, ahead in row) for row in rows)
    return program_of(plan, total, messages, devices, training=training, ahead=ahead)


# -- written out ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unrolling:
    """Writes out the first `number` mini-batches of a continuous program; each has ids and micro-batches of its own."""

    base: Program
    number: int

    def program(self) -> Program:
        base, total = self.base, self.base.batch_size * self.number
        plan = replace(base.plan, batch_size=total, period=base.batch_size)
        messages = tuple(self._message(message, batch) for batch in range(self.number) for message in base.messages)
        devices = [tuple(self._row(device)) for device in range(len(base.devices))]
        return program_of(plan, total, messages, devices, training=base.training)

    def _row(self, device: int) -> Iterator[Instruction]:
        lead, instructions = self.base.lead_of(device), self.base.devices[device]
        row = self.base.ahead_of(device)
        for period in range(-lead, self.number):
            for instruction, ahead in zip(instructions, row, strict=True):
                if 0 <= period + ahead < self.number:
                    yield self._instruction(instruction, period + ahead)

    def _instruction(self, instruction: Instruction, batch: int) -> Instruction:
        if instruction.action is not None:
            return Instruction(instruction.op, action=self._action(instruction.action, batch))
        assert instruction.message is not None
        return Instruction(instruction.op, message=instruction.message + batch * len(self.base.messages))

    def _action(self, action: Action, batch: int) -> Action:
        if not batch:
            return action
        count = 1 if action.kind is Kind.REDUCE else len(self.base.plan.intervals(action.stage, self.base.batch_size))
        return action.at(action.micro_batch + batch * count)

    def _message(self, message: Message, batch: int) -> Message:
        shift = batch * self.base.batch_size
        return Message(
            id=message.id + batch * len(self.base.messages),
            edge=message.edge,
            gradient=message.gradient,
            src=message.src,
            dst=message.dst,
            start=message.start + shift,
            stop=message.stop + shift,
            producer=self._action(message.producer, batch),
            consumer=self._action(message.consumer, batch),
        )
