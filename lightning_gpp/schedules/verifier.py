"""Proves, before anything runs, that a program cannot deadlock and never computes with missing data.

The proofs assume rendezvous semantics, the weakest guarantee of NCCL and gloo: a transfer completes only when its
receive has been posted, and the n-th send from a to b matches the n-th receive of b from a. There are six proofs, each
linear in the number of instructions:

    actions      every stage replica runs every micro-batch once, backward after forward
    collectives  replicas call them in one order; parameters are unsharded when read, gradients complete when reduced
    coverage     the messages carry every sample that every action needs, once
    use          on each device: produced, then sent; posted, then waited for, then read; each once
    channels     sends and receives of each directed pair of devices have the same order
    progress     all devices reach their end, and no stage exceeds its limit of micro-batches in flight

`replay` runs a program on all devices at once under these semantics; the simulator is built on it, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan, Stage
from lightning_gpp.schedules.actions import COLLECTIVES, RELEASES, Action, Kind
from lightning_gpp.schedules.lowering import (
    Part,
    actions_of,
    carries_gradient,
    difference,
    message_between,
    parts_of,
    required_actions,
)
from lightning_gpp.schedules.passes import check_collectives
from lightning_gpp.schedules.program import Instruction, Message, Op, Program, describe

Parts = dict[tuple[int, int], Part]
"""Parts of one stage, by device and micro-batch."""


def check_coverage(program: Program) -> None:
    """Check that every message is the overlap of two parts, that no two are equal, and that readers get all samples.

    Raises:
        VerificationError: a message does not fit the plan, is duplicated, or is missing.
    """
    ends = {stage for edge in program.plan.edges for stage in (edge.src, edge.dst)}
    parts = {stage: _parts(program, stage) for stage in ends}
    for number, message in enumerate(program.messages):
        if not _fits(program, number, message, parts):
            raise VerificationError(f"The program's {describe(message)} does not fit the plan or its two actions.")
    _check_single(program)
    _check_sums(program, parts)


def _parts(program: Program, stage: int) -> Parts:
    return {(part.device, part.micro_batch): part for part in parts_of(program.plan, stage, program.batch_size)}


def _fits(program: Program, number: int, message: Message, parts: dict[int, Parts]) -> bool:
    if not 0 <= message.edge < len(program.plan.edges):
        return False
    edge = program.plan.edges[message.edge]
    tasks = (message.src, message.producer.micro_batch), (message.dst, message.consumer.micro_batch)
    above, below = reversed(tasks) if message.gradient else tasks
    upper, lower = parts[edge.src].get(above), parts[edge.dst].get(below)
    if upper is None or lower is None:
        return False
    derived = message_between(program.plan, message.edge, message.gradient, number, upper, lower, program.split)
    read = number in program.inputs.get((message.dst, message.consumer), ())
    made = number in program.outputs.get((message.src, message.producer), ())
    return message == derived and message.start < message.stop and read and made


def _check_single(program: Program) -> None:
    if len(set(map(_ends, program.messages))) < len(program.messages):
        raise VerificationError("The program contains the same message twice.")
    for name, links in (("inputs", program.inputs), ("outputs", program.outputs)):
        if sum(map(len, links.values())) != len(program.messages):
            raise VerificationError(f"The program's {name} list a message that does not exist, or one twice.")


def _ends(message: Message) -> tuple[object, ...]:
    return message.edge, message.gradient, message.src, message.producer, message.dst, message.consumer


def _check_sums(program: Program, parts: dict[int, Parts]) -> None:
    sent: Counter[tuple[int, bool, int, int]] = Counter()
    for message in program.messages:
        sent[message.edge, message.gradient, message.dst, message.consumer.micro_batch] += message.stop - message.start
    for index, gradient, part in _readers(program, parts):
        count = sent[index, gradient, part.device, part.micro_batch]
        if count != part.stop - part.start:
            edge = program.plan.edges[index]
            raise VerificationError(
                f"Messages are missing: micro-batch {part.micro_batch} on device {part.device} reads samples "
                f"[{part.start}, {part.stop}) of the {'gradients' if gradient else 'tensors'} of edge {edge.src} -> "
                f"{edge.dst}, the program's messages bring {count} of them."
            )


def _readers(program: Program, parts: dict[int, Parts]) -> Iterator[tuple[int, bool, Part]]:
    for index, edge in enumerate(program.plan.edges):
        yield from ((index, False, part) for part in parts[edge.dst].values())
        if program.training and carries_gradient(edge):
            yield from ((index, True, part) for part in parts[edge.src].values())


FIRST: Final = {
    Kind.RECOMPUTE: (Kind.FORWARD, "forward"),
    Kind.BACKWARD: (Kind.FORWARD, "forward"),
    Kind.INPUT: (Kind.FORWARD, "forward"),
    Kind.WEIGHT: (Kind.INPUT, "input gradients"),
    Kind.OFFLOAD: (Kind.FORWARD, "forward"),
    Kind.LOAD: (Kind.OFFLOAD, "offload"),
}
"""The kind of the same micro-batch's action that must precede one of a kind, and its name."""

_VERBS: Final = {Op.SEND: "sends", Op.POST: "posts a buffer for", Op.WAIT: "waits for"}
_INFINITIVES: Final = {Op.SEND: "send", Op.POST: "post a buffer for", Op.WAIT: "wait for"}


def verify(program: Program, limits: Mapping[int, int] | None = None) -> None:
    """Refuse a program that would deadlock or compute with missing data.

    Args:
        program: the program to check.
        limits: the most micro-batches in flight on a replica of every stage; not checked by default.

    Raises:
        VerificationError: names the device and the message; for a deadlock, the cycle of waits.
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
    return list(actions_of(program.devices[device]))


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
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            before, name = _prepares_backward(plan.stages[action.stage])
        if before is not None and action.of_kind(before) not in done:
            raise VerificationError(f"Device {device} runs {action} before the {name} of the same micro-batch.")
        done.add(action)


def _prepares_backward(stage: Stage) -> tuple[Kind, str]:
    """The kind of action before a stage's backward, and its name."""
    if stage.offload:
        return Kind.LOAD, "load"
    return (Kind.RECOMPUTE, "recomputation") if stage.reruns else (Kind.FORWARD, "forward")


def _check_use(program: Program) -> None:
    done: dict[Op, set[int]] = {op: set() for op in _VERBS}
    for device in range(len(program.devices)):
        for op, numbers in _DeviceState(program, device).follow().items():
            done[op] |= numbers
    for op, verb in _VERBS.items():
        for message in program.messages:
            if message.src != message.dst and message.id not in done[op]:
                device = message.src if op is Op.SEND else message.dst
                raise VerificationError(f"Device {device} never {verb} {describe(message)}.")


@dataclass(slots=True)
class _DeviceState:
    """The state of one device along its instructions: actions computed, messages sent, posted and waited for."""

    program: Program
    device: int
    computed: set[Action] = field(default_factory=set)
    done: dict[Op, set[int]] = field(default_factory=lambda: {op: set() for op in _VERBS})

    def follow(self) -> dict[Op, set[int]]:
        """Check the device's instructions; returns the messages to which every operation was applied."""
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
                self._fail(f"computes {action} before {message.producer} produces", number)
            if message.src != message.dst and number not in self.done[Op.WAIT]:
                self._fail(f"computes {action} without having waited for", number)
        self.computed.add(action)

    def _communicate(self, op: Op, number: int) -> None:
        message = self._message(op, number)
        if number in self.done[op]:
            self._fail(_VERBS[op], number, " twice")
        if op is Op.SEND and message.producer not in self.computed:
            self._fail("sends", number, f" before {message.producer} produces it")
        if op is Op.WAIT and number not in self.done[Op.POST]:
            self._fail("waits for", number, " without having posted a buffer")
        self.done[op].add(number)

    def _message(self, op: Op, number: int) -> Message:
        if not 0 <= number < len(self.program.messages):
            raise VerificationError(f"Device {self.device} {_VERBS[op]} message {number}, which does not exist.")
        message = self.program.messages[number]
        end = message.src if op is Op.SEND else message.dst
        if message.src == message.dst:
            self._fail(_VERBS[op], number, ", which stays on its device")
        if end != self.device:
            self._fail(_VERBS[op], number, f", which device {end} has to {_INFINITIVES[op]}")
        return message

    def _fail(self, what: str, number: int, problem: str = "") -> None:
        raise VerificationError(f"Device {self.device} {what} {describe(self.program.messages[number])}{problem}.")


def _check_channels(program: Program) -> None:
    """Check that the n-th send from a to b and the n-th receive of b from a are the same message."""
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
        raise VerificationError(_cycle(program, blocked))
    waits = collective_deadlock(program)
    if waits:
        raise VerificationError(
            f"The program deadlocks: {waits}, and these wait for messages that are sent only afterwards. Unshard "
            "parameters before all actions, and reduce gradients after them."
        )


def collective_deadlock(program: Program) -> str:
    """The devices that would deadlock in a collective, in words; empty if there are none.

    Possible only with fsdp, whose all-gathers and reduce-scatters wait for all replicas; an all-reduce is asynchronous.
    """
    if program.plan.sharding != "fsdp":
        return ""
    blocked = replay(program, lambda device, instruction: None, collectives=True)
    actions = ((device, program.devices[device][position].action) for device, position in blocked.items())
    return ", ".join(
        f"device {device} waits in {action} for the other replicas of stage {action.stage}"
        for device, action in actions
        if action is not None
    )


def _cycle(program: Program, blocked: dict[int, int]) -> str:
    """The wait-for cycle in words. A blocked device waits for one that has not sent, which is blocked, too."""
    devices: list[int] = []
    device = next(iter(blocked))
    while device not in devices:
        devices.append(device)
        device = _awaited(program, device, blocked[device]).src
    cycle = devices[devices.index(device) :]
    waits = ", which ".join(_wait(program, member, blocked[member]) for member in cycle)
    return (
        f"The program deadlocks: device {device} {waits}, which closes the cycle. "
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


def replay(program: Program, visit: Callable[[int, Instruction], None], *, collectives: bool = False) -> dict[int, int]:
    """Call `visit(device, instruction)` for every instruction that can run, each device in its own order.

    A send never blocks its device; a transfer completes once it has been sent and its buffer has been posted. Only WAIT
    blocks, and, on request, the collectives of sharded parameters, in which a stage's replicas wait for each other.

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
