"""Runs a program on all devices at once, under rendezvous semantics. Verifier and simulator are built on it.

A send never blocks its device; a transfer completes once it has been sent and its buffer has been posted. Only WAIT
blocks, and, on request, the collectives of sharded parameters, in which the replicas of a stage wait for each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.program import Instruction, Op, Program


def replay(program: Program, visit: Callable[[int, Instruction], None], *, collectives: bool = False) -> dict[int, int]:
    """Call `visit(device, instruction)` for every instruction that can run, each device in its own order.

    A WAIT is visited once its message has been sent and posted. The run time is linear in the number of instructions.

    Args:
        program: the program to run.
        visit: called for every instruction.
        collectives: whether an UNSHARD or REDUCE is visited only once all replicas of its stage have reached it.

    Returns:
        The index of the instruction in which each blocked device waits; empty if the program runs to its end.
    """
    position = [0] * len(program.devices)
    sent: set[int | None] = set()
    posted: set[int | None] = set()
    waiting: dict[int | None, int] = {}
    ready = deque(range(len(program.devices)))
    barriers = _Barriers(program.plan, ready) if collectives else None
    while ready:
        device = ready.popleft()
        instructions = program.devices[device]
        while position[device] < len(instructions):
            instruction = instructions[position[device]]
            op, message = instruction.op, instruction.message
            if op is Op.WAIT and not (message in sent and message in posted):
                waiting[message] = device
                break
            if barriers is not None and not barriers.passes(device, instruction.action):
                break
            if op is Op.POST:
                posted.add(message)
            elif op is Op.SEND:
                sent.add(message)
                if message in waiting and message in posted:
                    ready.append(waiting.pop(message))
            visit(device, instruction)
            position[device] += 1
    return {d: position[d] for d, instructions in enumerate(program.devices) if position[d] < len(instructions)}


class _Barriers:
    """The devices that have reached each collective."""

    def __init__(self, plan: Plan, ready: deque[int]) -> None:
        self._plan, self._ready = plan, ready
        self._present: dict[Action, set[int]] = defaultdict(set)

    def passes(self, device: int, action: Action | None) -> bool:
        """True if a device that reaches an action may go on. The last one to arrive releases the others."""
        if action is None or action.kind not in (Kind.UNSHARD, Kind.REDUCE):
            return True
        present, replicas = self._present[action], self._plan.devices_of(action.stage)
        if device not in present:
            present.add(device)
            if len(present) == len(replicas):
                self._ready.extend(sorted(present - {device}))
        return len(present) == len(replicas)
