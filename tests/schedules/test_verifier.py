"""What the verifier refuses, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_gpp.errors import VerificationError
from lightning_gpp.schedules import (
    Instruction,
    Op,
    Program,
    compile_program,
    in_flight,
    lower,
    make_schedule,
    verify,
)
from tests.strategies import action_of, chain, plan_of, schedule_of

PLAN = chain((1, 1), 2)
PROGRAM = compile_program(PLAN)
"""Device 0 posts messages 0 and 1, waits for 0, computes 1F0, 1B0, sends 2, waits for 1, computes 1F1, 1B1, sends 3."""


def edited(program: Program, device: int, edit: Callable[[list[Instruction]], None]) -> Program:
    """The program with the list of one device changed."""
    instructions = list(program.devices[device])
    edit(instructions)
    devices = list(program.devices)
    devices[device] = tuple(instructions)
    return replace(program, devices=tuple(devices))


def without(program: Program, device: int, op: Op, message: int) -> Program:
    return edited(program, device, lambda rows: rows.remove(Instruction(op, message=message)))


@pytest.mark.parametrize(
    ("device", "instruction", "message"),
    [
        (1, Instruction(Op.SEND, message=1), r"Device 1 sends message 1 \(.*\) twice"),
        (0, Instruction(Op.POST, message=0), r"Device 0 posts a buffer for message 0 \(.*\) twice"),
        (0, Instruction(Op.SEND, message=0), "Device 0 sends message 0 .*, which device 1 has to send"),
        (0, Instruction(Op.SEND, message=9), "Device 0 sends message 9, which does not exist"),
        (0, Instruction(Op.COMPUTE, action=action_of("1F0")), "device 0 has one too many of 1F0"),
    ],
)
def test_added(device: int, instruction: Instruction, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(edited(PROGRAM, device, lambda rows: rows.append(instruction)))


def test_missing_message() -> None:
    """A program whose messages are consistent among themselves, but do not bring all that is read."""
    last = PROGRAM.messages[-1]
    program = without(without(without(PROGRAM, 0, Op.SEND, last.id), 1, Op.POST, last.id), 1, Op.WAIT, last.id)
    empty = {(last.dst, last.consumer): ()}
    program = replace(
        program,
        messages=program.messages[:-1],
        inputs=program.inputs | empty,
        outputs=program.outputs | {(last.src, last.producer): ()},
    )
    with pytest.raises(
        VerificationError, match=r"micro-batch 1 on device 1 reads samples \[1, 2\) of the gradients.* 0 of"
    ):
        verify(program)


def test_wrong_message() -> None:
    messages = (replace(PROGRAM.messages[0], stop=2), *PROGRAM.messages[1:])
    with pytest.raises(VerificationError, match=r"message 0 \(tensors of samples \[0, 2\).* does not fit the plan"):
        verify(replace(PROGRAM, messages=messages))


def test_repeated_input() -> None:
    task = (0, action_of("1F0"))
    with pytest.raises(VerificationError, match="inputs list a message that does not exist, or one twice"):
        verify(replace(PROGRAM, inputs=PROGRAM.inputs | {task: (0, 0)}))


def test_more_in_flight_than_promised() -> None:
    plan = chain((1, 1, 1), 8)
    program = lower(plan, make_schedule(replace(plan, schedule="gpipe")))
    verify(program)
    assert in_flight(plan) == {0: 3, 1: 2, 2: 1}
    with pytest.raises(VerificationError, match="Device 2 has 4 micro-batches in flight at 0F3; .*promises at most 3"):
        verify(program, {0: 3})


def test_a_deadlock_is_told_as_a_cycle() -> None:
    schedule = schedule_of("0: 1F0 1F1 1B0 1B1\n1: 0F0 0B0 0F1 0B1")
    program = lower(PLAN, schedule)
    message = (
        r"The program deadlocks: device 0 waits in 1F1 for message 1 \(tensors of samples \[1, 2\), 0F1 to 1F1\) from "
        r"device 1, which waits in 0B0 for message 2 \(gradients of samples \[0, 1\), 1B0 to 0B0\) from device 0, "
        r"which closes the cycle"
    )
    with pytest.raises(VerificationError, match=message):
        verify(program)


def test_a_device_outside_the_cycle_waits_for_it() -> None:
    plan = plan_of([(0, 1), (1, 2)], (1, 1, 1), 2, devices=[(0,), (1,), (2,)])
    schedule = schedule_of("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 2F0 2F1 2B0 2B1")
    with pytest.raises(
        VerificationError, match=r"deadlocks: device 1 waits in 1B0 .* from device 2, which waits in 2F1"
    ):
        verify(lower(plan, schedule))
