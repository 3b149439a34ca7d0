"""The verifier's proofs know devices only: here the members of devices run the same program, under rendezvous."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from lightning_gpp.schedules import Instruction, Op, Program, compile_program
from tests.strategies import chain, plan_of, towers

Member = tuple[int, int]
"""A device and the number of one of its processes."""

PLANS = {
    "chain": chain((1, 2), 8),
    "branches": towers(2, 1, 8),
    "replicas": plan_of([(0, 1), (1, 2)], [2, 2, 2], 8, devices=[(1, 2), (3,), (0,)]),
}
NUMBERS = [(1, 2, 2, 2), (2, 1, 1, 1), (2, 4, 4, 4), (4, 1, 1, 1), (1, 2, 2, 1), (2, 4, 4, 1)]
"""Numbers of members by device; those of replicas are equal."""


class Members:
    """All members of all devices, each at an instruction of its device."""

    def __init__(self, program: Program, numbers: tuple[int, ...]) -> None:
        self.program, self.numbers = program, numbers[: len(program.devices)]
        self.position = {(device, k): 0 for device, number in enumerate(self.numbers) for k in range(number)}
        self.sent: set[tuple[int, Member]] = set()
        self.channels: dict[Op, dict[tuple[Member, Member], list[int]]] = {
            op: defaultdict(list) for op in (Op.SEND, Op.POST)
        }

    def at(self, member: Member) -> Instruction | None:
        instructions = self.program.devices[member[0]]
        return instructions[self.position[member]] if self.position[member] < len(instructions) else None

    def receivers(self, member: Member, device: int) -> list[Member]:
        """The members of a device that receive from this one."""
        return [(device, k) for k in range(self.numbers[device]) if k % self.numbers[member[0]] == member[1]]

    def can_go_on(self, member: Member, instruction: Instruction) -> bool:
        device, _ = member
        if instruction.op is Op.COMPUTE:  # in which the members of a device wait for each other
            return all(self.position[device, k] >= self.position[member] for k in range(self.numbers[device]))
        return instruction.op is not Op.WAIT or (instruction.message or 0, member) in self.sent

    def go_on(self, member: Member, instruction: Instruction) -> None:
        number = instruction.message or 0
        if instruction.op is Op.SEND:
            for receiver in self.receivers(member, self.program.messages[number].dst):
                self.sent.add((number, receiver))
                self.channels[Op.SEND][member, receiver].append(number)
        if instruction.op is Op.POST:
            source = self.program.messages[number].src
            sender = source, member[1] % self.numbers[source]
            self.channels[Op.POST][sender, member].append(number)
        self.position[member] += 1

    def run(self) -> None:
        """Let members go on until none can."""
        moves = True
        while moves:
            moves = False
            for member in self.position:
                while (instruction := self.at(member)) is not None and self.can_go_on(member, instruction):
                    self.go_on(member, instruction)
                    moves = True


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("name", PLANS)
def test_members_reach_the_end_and_match_their_messages(name: str, schedule: str, numbers: tuple[int, ...]) -> None:
    members = Members(compile_program(replace(PLANS[name], schedule=schedule)), numbers)
    members.run()
    assert all(members.at(member) is None for member in members.position)
    assert members.channels[Op.SEND] == members.channels[Op.POST]
