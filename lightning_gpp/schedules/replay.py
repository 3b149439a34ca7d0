"""Plays a program on all devices at once, under rendezvous semantics; the verifier and the simulator stand on it.

A send never blocks its device; its transfer completes when it was sent and its buffer was posted. Only WAIT blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning_gpp.schedules.program import Instruction, Op, Program


def replay(program: Program, visit: Callable[[int, Instruction], None]) -> dict[int, int]:
    """Call `visit(device, instruction)` for every instruction that can run, each device in its own order.

    A WAIT is visited once its message has been sent and posted. Takes time in proportion to the instructions.

    Returns:
        For every device that could not go on, the index of the WAIT it stands at. Empty if the program runs through.
    """
    position = [0] * len(program.devices)
    sent: set[int | None] = set()
    posted: set[int | None] = set()
    waiting: dict[int | None, int] = {}
    ready = deque(range(len(program.devices)))
    while ready:
        device = ready.popleft()
        instructions = program.devices[device]
        while position[device] < len(instructions):
            instruction = instructions[position[device]]
            op, message = instruction.op, instruction.message
            if op is Op.WAIT and not (message in sent and message in posted):
                waiting[message] = device
                break
            if op is Op.POST:
                posted.add(message)
            elif op is Op.SEND:
                sent.add(message)
                if message in waiting and message in posted:
                    ready.append(waiting.pop(message))
            visit(device, instruction)
            position[device] += 1
    return {device: position[device] for device in sorted(waiting.values())}
