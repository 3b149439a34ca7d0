"""For any plan: a program that was broken is refused, and replicas do the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import (
    Action,
    Instruction,
    Kind,
    Op,
    Program,
    compile_program,
    make_schedule,
    verify,
)
from tests.strategies import plans

RUNS = settings(max_examples=60, deadline=None)


@RUNS
@given(plan=plans())
def test_replicas_run_the_same_actions(plan: Plan) -> None:
    schedule = make_schedule(plan)
    for index, stage in enumerate(plan.stages):
        computed = [[a for a in actions if a.kind is not Kind.DATA] for actions in schedule.devices]
        orders = {tuple(a for a in computed[device] if a.stage == index) for device in stage.devices}
        assert len(orders) == 1


@RUNS
@given(program=plans().map(compile_program), data=st.data())
def test_a_program_without_one_instruction_is_refused(program: Program, data: st.DataObject) -> None:
    device = data.draw(st.integers(0, len(program.devices) - 1))
    index = data.draw(st.integers(0, len(program.devices[device]) - 1))
    instructions = program.devices[device]
    with pytest.raises(VerificationError):
        verify(_edited(program, device, (*instructions[:index], *instructions[index + 1 :])))


@RUNS
@given(program=plans().map(compile_program), data=st.data())
def test_a_program_with_two_swapped_instructions_is_refused(program: Program, data: st.DataObject) -> None:
    """Two posts, or two sends, of the same pair of devices; or two actions of which one needs the other."""
    device = data.draw(st.integers(0, len(program.devices) - 1))
    instructions = list(program.devices[device])
    pairs = [(i, j) for i in range(len(instructions)) for j in _dependent(program, device, i)]
    assume(pairs)
    first, second = data.draw(st.sampled_from(pairs))
    instructions[first], instructions[second] = instructions[second], instructions[first]
    with pytest.raises(VerificationError):
        verify(_edited(program, device, tuple(instructions)))


def _edited(program: Program, device: int, instructions: tuple[Instruction, ...]) -> Program:
    return replace(program, devices=(*program.devices[:device], instructions, *program.devices[device + 1 :]))


def _dependent(program: Program, device: int, index: int) -> list[int]:
    """The first later instruction of the same kind that must not come before this one, if any."""
    instructions = program.devices[device]
    first = instructions[index]
    for later in range(index + 1, len(instructions)):
        second = instructions[later]
        if second.op is first.op and _needs(program, device, first, second):
            return [later]
    return []


def _needs(program: Program, device: int, first: Instruction, second: Instruction) -> bool:
    if first.op is Op.COMPUTE:
        assert first.action is not None
        assert second.action is not None
        own = second.action == Action(first.action.stage, Kind.BACKWARD, first.action.micro_batch)
        forward = first.action.kind is Kind.FORWARD
        read = set(program.inputs[device, second.action]) & set(program.outputs[device, first.action])
        return bool(read) or (own and forward)
    ends = {(m.src, m.dst) for m in program.messages if m.id in (first.message, second.message)}
    return first.op in (Op.POST, Op.SEND) and len(ends) == 1
