"""Receipts: the points at which a device knows, without asking, that its messages have arrived.

gloo reports arrival only by blocking. But the order of a program is fixed, so any answer that was sent after a message
had been waited for proves its arrival: the gradients of a micro-batch, say, prove that its activations arrived. From
then on waiting for the send takes no time, and its tensors can be released.
"""

from __future__ import annotations

from lightning_gpp.schedules.continuous import unrolled
from lightning_gpp.schedules.program import Instruction, Op, Program
from lightning_gpp.schedules.verifier import replay

Receipts = dict[int, list[tuple[int, int]]]
"""Number of a WAIT instruction -> the sent messages whose arrival it proves: the mini-batches by which each is ahead of
the one that the period completes (0 in a program that flushes), and its id.
"""


def receipts(program: Program) -> list[Receipts]:
    """The receipts of every device, by one replay of the program with vector clocks (Mattern 1989).

    Those of a continuous program are those of a period in its steady state.
    """
    if program.ahead:
        return [_of_period(program, device, found) for device, found in enumerate(_found(_written_out(program)))]
    return [{wait: [(0, number) for number in sent] for wait, sent in found.items()} for found in _found(program)]


def _found(program: Program) -> list[dict[int, list[int]]]:
    clocks = _Clocks(program)
    replay(program, clocks.visit)
    return clocks.receipts


def _written_out(program: Program) -> Program:
    return unrolled(program, _steady(program) + program.lead + 1)


def _steady(program: Program) -> int:
    """A period by which the fill is over, and everything that it left open is done."""
    return 2 * program.lead + 1


def _of_period(program: Program, device: int, found: dict[int, list[int]]) -> Receipts:
    period, size = _steady(program), len(program.messages)
    row = program.ahead[device]
    before = sum(1 for t in range(-program.lead_of(device), period) for ahead in row if t + ahead >= 0)
    ids = {wait - before: found.get(wait, []) for wait in range(before, before + len(row))}
    return {wait: [(number // size - period, number % size) for number in sent] for wait, sent in ids.items() if sent}


class _Clocks:
    """For every device, the number of instructions of each device known to be done, and its open sends."""

    def __init__(self, program: Program) -> None:
        devices = range(len(program.devices))
        self._messages = program.messages
        self._clocks = [[0 for _ in devices] for _ in devices]
        self._open: list[list[int]] = [[] for _ in devices]
        self._sent: dict[int, list[int]] = {}
        self._arrival = _arrivals(program)
        self.receipts: list[dict[int, list[int]]] = [{} for _ in devices]

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
