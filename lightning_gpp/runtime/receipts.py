"""Receipts: when a device knows that what it sent has arrived, without asking.

gloo tells only by blocking. But the order of a program is fixed, so an answer that was sent after a message was waited
for proves that it arrived: the gradients of a micro-batch, say, prove that its activations did. From then on waiting
for the send takes no time, and its tensors can be released.
"""

from __future__ import annotations

from lightning_gpp.schedules.program import Instruction, Op, Program
from lightning_gpp.schedules.replay import replay

Receipts = dict[int, list[int]]
"""Number of a WAIT instruction -> ids of the sent messages whose arrival it proves."""


def receipts(program: Program) -> list[Receipts]:
    """The receipts of every device, by one replay of the program with vector clocks (Mattern 1989)."""
    clocks = _Clocks(program)
    replay(program, clocks.visit)
    return clocks.receipts


class _Clocks:
    """For every device how many instructions of each device are known to be done, and which of its sends are open."""

    def __init__(self, program: Program) -> None:
        devices = range(len(program.devices))
        self._messages = program.messages
        self._clocks = [[0 for _ in devices] for _ in devices]
        self._open: list[list[int]] = [[] for _ in devices]
        self._sent: dict[int, list[int]] = {}
        self._arrival = _arrivals(program)
        self.receipts: list[Receipts] = [{} for _ in devices]

    def visit(self, device: int, instruction: Instruction) -> None:
        clock, message = self._clocks[device], instruction.message
        if message is not None and instruction.op is Op.SEND:
            self._sent[message] = list(clock)
            self._open[device].append(message)
        if message is not None and instruction.op is Op.WAIT:
            clock[:] = map(max, clock, self._sent.pop(message))
            self._note(device, clock)
        clock[device] += 1

    def _note(self, device: int, clock: list[int]) -> None:
        known = [i for i in self._open[device] if clock[self._messages[i].dst] > self._arrival[i]]
        if known:
            self.receipts[device][clock[device]] = known
            self._open[device] = [i for i in self._open[device] if i not in known]


def _arrivals(program: Program) -> dict[int, int]:
    """Message id -> number of its WAIT on the receiving device."""
    return {
        instruction.message: position
        for instructions in program.devices
        for position, instruction in enumerate(instructions)
        if instruction.op is Op.WAIT and instruction.message is not None
    }
