"""Proves, before anything runs, that a program cannot hang and never computes with missing data.

Rendezvous semantics, the weakest promise of NCCL and gloo: a transfer completes only when its receive was posted; the
n-th send from a to b meets the n-th receive of b from a; nothing else pairs them. Six proofs, each in time
proportional to the instructions:

    actions    every stage replica runs every micro-batch once, backward after forward
    gatherings replicas meet in one order; parameters are whole when they are read, gradients complete when summed
    coverage   the messages carry every sample that every action needs, once
    use        in each device's list: made, then sent; posted, then waited for, then read; each once
    channels   on each directed pair of devices sends and receives have the same order
    progress   played together, all devices come to their end; and no stage exceeds its promise of micro-batches
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import COLLECTIVES, RELEASES, Action, Kind
from lightning_gpp.schedules.collectives import check_collectives
from lightning_gpp.schedules.coverage import check_coverage
from lightning_gpp.schedules.lowering import difference, required_actions
from lightning_gpp.schedules.order_check import FIRST
from lightning_gpp.schedules.program import Message, Op, Program, describe
from lightning_gpp.schedules.replay import replay

_VERBS: Final = {Op.SEND: "sends", Op.POST: "posts a buffer for", Op.WAIT: "waits for"}


def verify(program: Program, limits: Mapping[int, int] | None = None) -> None:
    """Refuse a program that would hang, or compute with missing data.

    Args:
        program: what to prove.
        limits: for every stage the most micro-batches in flight on a replica; not checked by default.

    Raises:
        VerificationError: says which device and which message; for a hang the whole circle of waits.
    """
    _check_actions(program)
    check_collectives(program.plan, [computed(program, device) for device in range(len(program.devices))])
    check_coverage(program)
    _check_use(program)
    _check_channels(program)
    _check_limits(program, limits or {})
    _check_progress(program)


def computed(program: Program, device: int) -> list[Action]:
    """The actions of a device, in order."""
    return [instruction.action for instruction in program.devices[device] if instruction.action is not None]


def _check_actions(program: Program) -> None:
    plan = program.plan
    if len(program.devices) != plan.num_devices:
        raise VerificationError(f"The program has {len(program.devices)} devices, its plan {plan.num_devices}.")
    for device in range(len(program.devices)):
        actions = [action for action in computed(program, device) if action.kind not in COLLECTIVES]
        needed = required_actions(plan, device, program.batch_size, program.training, program.split)
        problem = difference(needed, actions)
        if problem:
            raise VerificationError(f"The program of device {device} {problem}.")
        _check_sequence(plan, device, actions)


def _check_sequence(plan: Plan, device: int, actions: list[Action]) -> None:
    done: set[Action] = set()
    for action in actions:
        before, name = FIRST.get(action.kind, (None, ""))
        if before is Kind.FORWARD and action.kind is not Kind.RECOMPUTE and plan.stages[action.stage].recompute:
            before, name = Kind.RECOMPUTE, "recomputation"
        if before is not None and action._replace(kind=before) not in done:
            raise VerificationError(f"Device {device} runs {action} before the {name} of the same micro-batch.")
        done.add(action)


def _check_use(program: Program) -> None:
    done: dict[Op, set[int]] = {op: set() for op in _VERBS}
    for device in range(len(program.devices)):
        for op, numbers in _Use(program, device).follow().items():
            done[op] |= numbers
    for op, verb in _VERBS.items():
        for message in program.messages:
            if message.src != message.dst and message.id not in done[op]:
                device = message.src if op is Op.SEND else message.dst
                raise VerificationError(f"Device {device} never {verb} {describe(message)}.")


@dataclass(slots=True)
class _Use:
    """Follows one device's list: what was computed, sent, posted and waited for."""

    program: Program
    device: int
    computed: set[Action] = field(default_factory=set)
    done: dict[Op, set[int]] = field(default_factory=lambda: {op: set() for op in _VERBS})

    def follow(self) -> dict[Op, set[int]]:
        """Check the device's list; what it does with which messages."""
        for instruction in self.program.devices[self.device]:
            if instruction.action is not None:
                self._compute(instruction.action)
            elif instruction.message is not None:
                self._communicate(instruction.op, instruction.message)
        return self.done

    def _compute(self, action: Action) -> None:
        for number in self.program.inputs.get((self.device, action), ()):
            message = self.program.messages[number]
            if message.src == message.dst and message.producer not in self.computed:
                self._fail(f"computes {action} before {message.producer}, which makes its input", number)
            if message.src != message.dst and number not in self.done[Op.WAIT]:
                self._fail(f"computes {action} without having waited for", number)
        self.computed.add(action)

    def _communicate(self, op: Op, number: int) -> None:
        message = self._message(op, number)
        if number in self.done[op]:
            self._fail(f"{_VERBS[op]} twice:", number)
        if op is Op.SEND and message.producer not in self.computed:
            self._fail(f"sends before {message.producer} made it:", number)
        if op is Op.WAIT and number not in self.done[Op.POST]:
            self._fail("waits without having posted a buffer for", number)
        self.done[op].add(number)

    def _message(self, op: Op, number: int) -> Message:
        if not 0 <= number < len(self.program.messages):
            raise VerificationError(f"Device {self.device} {_VERBS[op]} message {number}, which does not exist.")
        message = self.program.messages[number]
        end = message.src if op is Op.SEND else message.dst
        if message.src == message.dst or end != self.device:
            self._fail(f"{_VERBS[op]}, though it is not its own to do so,", number)
        return message

    def _fail(self, what: str, number: int) -> None:
        raise VerificationError(f"Device {self.device} {what} {describe(self.program.messages[number])}.")


def _check_channels(program: Program) -> None:
    """The n-th send of a to b and the n-th receive of b from a must be the same message."""
    orders: dict[Op, dict[tuple[int, int], list[int]]] = {op: defaultdict(list) for op in (Op.SEND, Op.POST)}
    for instructions in program.devices:
        for instruction in instructions:
            if instruction.op in orders and instruction.message is not None:
                message = program.messages[instruction.message]
                orders[instruction.op][message.src, message.dst].append(message.id)
    for (src, dst), sends in orders[Op.SEND].items():
        for n, (send, post) in enumerate(zip(sends, orders[Op.POST][src, dst], strict=True)):
            if send != post:
                raise VerificationError(
                    f"Messages from device {src} to device {dst} match by order alone, but number {n} differs: "
                    f"device {src} sends {describe(program.messages[send])}; "
                    f"device {dst} posts a buffer for {describe(program.messages[post])}."
                )


def _check_limits(program: Program, limits: Mapping[int, int]) -> None:
    flying: Counter[tuple[int, int]] = Counter()
    for device in range(len(program.devices)):
        for action in computed(program, device):
            flying[device, action.stage] += (action.kind is Kind.FORWARD) - (action.kind in RELEASES)
            limit = limits.get(action.stage)
            if program.training and limit is not None and flying[device, action.stage] > limit:
                raise VerificationError(
                    f"Device {device} has {flying[device, action.stage]} micro-batches in flight at {action}; the "
                    f"schedule {program.plan.schedule!r} promises at most {limit} for stage "
                    f"{program.plan.stages[action.stage].name!r}."
                )


def _check_progress(program: Program) -> None:
    blocked = replay(program, lambda device, instruction: None)
    if blocked:
        raise VerificationError(_circle(program, blocked))
    standing = stands_at_meetings(program)
    if standing:
        raise VerificationError(
            f"The program hangs: {standing} wait for other replicas of the stage, which wait for what these would do "
            "next. Gather parameters before all work, and sum gradients after it."
        )


def stands_at_meetings(program: Program) -> str:
    """Where devices stand for good if replicas that gather parameters or sum gradients wait for each other; empty where
    none does. Only with sharded parameters do they: else a sum is started and left alone."""
    if program.plan.sharding != "fsdp":
        return ""
    blocked = replay(program, lambda device, instruction: None, meetings=True)
    found = ((device, program.devices[device][position].action) for device, position in blocked.items())
    return ", ".join(f"device {device} at {action}" for device, action in found if action is not None)


def _circle(program: Program, blocked: dict[int, int]) -> str:
    """The wait-for cycle in words. A device that stands waits for one that did not send, and so stands too."""
    devices: list[int] = []
    device = next(iter(blocked))
    while device not in devices:
        devices.append(device)
        device = _awaited(program, device, blocked[device]).src
    cycle = devices[devices.index(device) :]
    waits = ", which ".join(_wait(program, member, blocked[member]) for member in cycle)
    return (
        f"The program hangs: device {device} {waits}, where the circle closes. "
        "Change the order of actions on one of these devices."
    )


def _wait(program: Program, device: int, position: int) -> str:
    rest = program.devices[device][position:]
    action = next(instruction.action for instruction in rest if instruction.action is not None)
    message = _awaited(program, device, position)
    return f"waits in {action} for {describe(message)} from device {message.src}"


def _awaited(program: Program, device: int, position: int) -> Message:
    number = program.devices[device][position].message
    return next(message for message in program.messages if message.id == number)
