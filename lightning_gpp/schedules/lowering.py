"""Lowering: derives the messages of a schedule, and inserts the instructions that move them.

The parts of a stage, one for each micro-batch and replica, tile the samples of the mini-batch. An edge of the stage
graph moves the common refinement of the tilings of its two ends. This covers different micro-batch sizes, different
numbers of replicas, fan-in and fan-out.

    producer, b=4, 1 replica    |       0       |       1       |
    consumer, b=6, 2 replicas   |     0     |     0     |   1   |   1   |  (replicas 0, 1, 0, 1)
    messages                    |     *     | * |   *   |   *   |   *   |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.schedules.actions import COPIES, Action, Kind, Schedule
from lightning_gpp.schedules.program import Instruction, Message, Op, Program

Split = frozenset[tuple[int, int]]
"""Stages and micro-batches whose backward is split into gradients of inputs and of parameters."""


@dataclass(frozen=True, slots=True)
class Part:
    """The samples `[start, stop)` that the replica on `device` works on in a micro-batch; never empty."""

    micro_batch: int
    device: int
    start: int
    stop: int


def parts_of(plan: Plan, stage: int, batch_size: int) -> list[Part]:
    """All parts of a stage, or of SOURCE, by their samples; together they tile the mini-batch."""
    parts, stage = [], plan.step_stage if stage == SOURCE else stage
    for number in range(len(plan.intervals(stage, batch_size))):
        for device in plan.devices_of(stage):
            start, stop = plan.share(stage, device, number, batch_size)
            if start < stop:
                parts.append(Part(number, device, start, stop))
    return parts


def samples_of(plan: Plan, stage: int, device: int, batch_size: int) -> list[int]:
    """Number of samples of every micro-batch of a stage that the replica on `device` works on; may be 0."""
    numbers = range(len(plan.intervals(stage, batch_size)))
    shares = (plan.share(stage, device, number, batch_size) for number in numbers)
    return [stop - start for start, stop in shares]


def all_samples(plan: Plan, batch_size: int) -> dict[tuple[int, int], list[int]]:
    """`samples_of` for every device and stage on it."""
    places = ((device, stage) for device in range(plan.num_devices) for stage in plan.stages_on(device))
    return {(device, stage): samples_of(plan, stage, device, batch_size) for device, stage in places}


def derive_messages(plan: Plan, batch_size: int, training: bool, split: Split = frozenset()) -> tuple[Message, ...]:
    """All messages of one mini-batch, including those that stay on their device; by edge, forward ones first.

    Raises:
        PlanError: an edge with tensors that cannot be cut joins stages with different micro-batches or replicas.
    """
    messages: list[Message] = []
    for index, edge in enumerate(plan.edges):
        pairs = list(_common(parts_of(plan, edge.src, batch_size), parts_of(plan, edge.dst, batch_size)))
        if not (edge.sliceable or edge.artificial):
            _check_uncut(plan, edge, pairs)
        for gradient in (False, True) if training and carries_gradient(edge) else (False,):
            numbered = enumerate(pairs, start=len(messages))
            messages += [message_between(plan, index, gradient, number, *pair, split) for number, pair in numbered]
    return tuple(messages)


def carries_gradient(edge: Edge) -> bool:
    """True if gradients flow back through the edge in training. Data have none."""
    return edge.differentiable and edge.src != SOURCE


def forward_action(plan: Plan, stage: int, micro_batch: int) -> Action:
    """The action that produces a stage's outputs: its forward, or the data action for SOURCE."""
    if stage == SOURCE:
        return Action(plan.step_stage, Kind.DATA, micro_batch)
    return Action(stage, Kind.FORWARD, micro_batch)


def _common(left: list[Part], right: list[Part]) -> Iterator[tuple[Part, Part]]:
    """Pairs of parts that overlap, in the order of their samples."""
    i = j = 0
    while i < len(left) and j < len(right):
        yield left[i], right[j]
        ends = left[i].stop, right[j].stop
        i += ends[0] <= ends[1]
        j += ends[1] <= ends[0]


def gradient_action(stage: int, micro_batch: int, split: Split) -> Action:
    """The action that computes a stage's input gradients from its output gradients."""
    return Action(stage, Kind.INPUT if (stage, micro_batch) in split else Kind.BACKWARD, micro_batch)


def message_between(
    plan: Plan, index: int, gradient: bool, number: int, upper: Part, lower: Part, split: Split = frozenset()
) -> Message:
    """The message of edge `index` between a part of its src, `upper`, and one of its dst, `lower`, that overlap."""
    edge = plan.edges[index]
    if gradient:
        producer = gradient_action(edge.dst, lower.micro_batch, split)
        consumer = gradient_action(edge.src, upper.micro_batch, split)
    else:
        producer = forward_action(plan, edge.src, upper.micro_batch)
        consumer = Action(edge.dst, Kind.FORWARD, lower.micro_batch)
    return Message(
        id=number,
        edge=index,
        gradient=gradient,
        start=max(upper.start, lower.start),
        stop=min(upper.stop, lower.stop),
        src=lower.device if gradient else upper.device,
        dst=upper.device if gradient else lower.device,
        producer=producer,
        consumer=consumer,
    )


def _check_uncut(plan: Plan, edge: Edge, pairs: list[tuple[Part, Part]]) -> None:
    if all((upper.start, upper.stop) == (lower.start, lower.stop) for upper, lower in pairs):
        return
    raise PlanError(
        f"{_end(plan, edge.src)} sends tensors to {_end(plan, edge.dst)} that are not one index per sample, so they "
        "cannot be cut into other micro-batches. Give both stages the same micro_batch_size and number of devices "
        "(strategy.stages)."
    )


def _end(plan: Plan, index: int) -> str:
    stage = plan.stages[plan.step_stage if index == SOURCE else index]
    name = f"The data source (on the devices of stage {stage.name!r})" if index == SOURCE else f"Stage {stage.name!r}"
    return f"{name} (micro_batch_size {stage.micro_batch_size}, {len(stage.devices)} replicas)"


LOOKAHEAD: Final = 2
"""Actions between posting a buffer and reading it."""

Links = dict[tuple[int, Action], tuple[int, ...]]
Posts = dict[tuple[int, int], list[int]]
"""Messages (ids) that a device posts before its n-th action: `posts[device, n]`."""


def lower(plan: Plan, schedule: Schedule, batch_size: int | None = None, training: bool = True) -> Program:
    """Insert all communication into a schedule.

    A message is sent right after the action that produces it and waited for right before the action that reads it. Its
    buffer is posted `LOOKAHEAD` actions before the latter, so that it can arrive while the device computes, or earlier
    if a later message from the same device needs it, because messages between two devices match by order alone. Posts
    never wait, so receivers delay nobody: a program can deadlock only if the schedule does.

    Args:
        plan: the plan.
        schedule: the order of actions on every device.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: whether the schedule contains backwards.

    Raises:
        PlanError: tensors would have to be cut that cannot be.
    """
    total = plan.batch_size if batch_size is None else batch_size
    messages = derive_messages(plan, total, training, split_of(schedule))
    inputs, outputs = _links(schedule, messages)
    posts = _posts(schedule, messages, outputs)
    devices = [_instructions(device, schedule, messages, inputs, outputs, posts) for device in _range(schedule)]
    return program_of(plan, total, messages, devices, training=training)


def program_of(
    plan: Plan,
    batch_size: int,
    messages: tuple[Message, ...],
    devices: Iterable[tuple[Instruction, ...]],
    *,
    training: bool = True,
    ahead: tuple[tuple[int, ...], ...] = (),
) -> Program:
    """The program of these messages and instructions; all else follows from them."""
    rows = tuple(devices)
    schedule = Schedule(tuple(map(actions_of, rows)))
    inputs, outputs = _links(schedule, messages)
    return Program(
        plan=plan,
        batch_size=batch_size,
        training=training,
        messages=messages,
        devices=rows,
        inputs=inputs,
        outputs=outputs,
        split=split_of(schedule),
        reduced=frozenset(a.stage for actions in schedule.devices for a in actions if a.kind is Kind.REDUCE),
        ahead=ahead,
    )


def actions_of(row: Iterable[Instruction]) -> tuple[Action, ...]:
    """The actions among some instructions."""
    return tuple(instruction.action for instruction in row if instruction.action is not None)


def required_actions(
    plan: Plan, device: int, batch_size: int, training: bool, split: Split = frozenset()
) -> list[Action]:
    """The actions that a device has to run for one mini-batch, in any order."""
    actions = []
    for stage in plan.stages_on(device):
        data = (Kind.DATA,) if stage == plan.step_stage and reads_data(plan) else ()
        for number in plan.micro_batches(stage, device, batch_size):
            back = _backward_kinds(plan, stage, (stage, number) in split) if training else ()
            actions += [Action(stage, kind, number) for kind in (*data, Kind.FORWARD, *back)]
    return actions


def reads_data(plan: Plan) -> bool:
    """True if the network has inputs from the user's step, so that there are data actions."""
    return any(edge.src == SOURCE for edge in plan.edges)


def split_of(schedule: Schedule) -> Split:
    """Stages and micro-batches whose backward a schedule splits."""
    actions = (action for device in schedule.devices for action in device)
    return frozenset((action.stage, action.micro_batch) for action in actions if action.kind is Kind.INPUT)


def _backward_kinds(plan: Plan, stage: int, split: bool) -> tuple[Kind, ...]:
    copies = COPIES if plan.stages[stage].offload else ()
    again = (Kind.RECOMPUTE,) if plan.stages[stage].reruns else ()
    return (*copies, *again, *((Kind.INPUT, Kind.WEIGHT) if split else (Kind.BACKWARD,)))


def difference(required: Iterable[Action], present: Iterable[Action]) -> str:
    """The missing and the superfluous actions, in words; empty if there are none."""
    wanted, given = Counter(required), Counter(present)
    missing, extra = (" ".join(map(str, part)) for part in (wanted - given, given - wanted))
    parts = [f"lacks {missing}"] * bool(missing) + [f"has one too many of {extra}"] * bool(extra)
    return " and ".join(parts)


def _links(schedule: Schedule, messages: tuple[Message, ...]) -> tuple[Links, Links]:
    """Messages that each action reads, and those that it produces, in the order in which they will be read."""
    position = _positions(schedule)
    inputs: dict[tuple[int, Action], list[int]] = {task: [] for task in position}
    outputs: dict[tuple[int, Action], list[int]] = {task: [] for task in position}
    for message in messages:
        inputs[message.dst, message.consumer].append(message.id)
        outputs[message.src, message.producer].append(message.id)
    for made in outputs.values():
        made.sort(key=lambda number: (position[messages[number].dst, messages[number].consumer], number))
    return {task: tuple(ids) for task, ids in inputs.items()}, {task: tuple(ids) for task, ids in outputs.items()}


def _posts(schedule: Schedule, messages: tuple[Message, ...], outputs: Links) -> Posts:
    position = _positions(schedule)
    posts: Posts = defaultdict(list)
    for (_, receiver), channel in sorted(_channels(schedule, messages, outputs).items()):
        points = [max(0, position[receiver, messages[number].consumer] - LOOKAHEAD) for number in channel]
        for i in reversed(range(len(points) - 1)):
            points[i] = min(points[i], points[i + 1])
        for number, point in zip(channel, points, strict=True):
            posts[receiver, point].append(number)
    return posts


def _channels(schedule: Schedule, messages: tuple[Message, ...], outputs: Links) -> dict[tuple[int, int], list[int]]:
    """The messages of every directed pair of devices, in the order in which they are sent."""
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    for device in _range(schedule):
        for action in schedule.devices[device]:
            for number in _remote(messages, outputs[device, action]):
                channels[device, messages[number].dst].append(number)
    return channels


def _instructions(
    device: int, schedule: Schedule, messages: tuple[Message, ...], inputs: Links, outputs: Links, posts: Posts
) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    for index, action in enumerate(schedule.devices[device]):
        instructions += [Instruction(Op.POST, message=number) for number in posts.get((device, index), ())]
        waits = _remote(messages, inputs[device, action])
        instructions += [Instruction(Op.WAIT, message=number) for number in waits]
        instructions.append(Instruction(Op.COMPUTE, action=action))
        sends = _remote(messages, outputs[device, action])
        instructions += [Instruction(Op.SEND, message=number) for number in sends]
    return tuple(instructions)


def _remote(messages: tuple[Message, ...], numbers: Iterable[int]) -> list[int]:
    return [number for number in numbers if messages[number].src != messages[number].dst]


def _positions(schedule: Schedule) -> dict[tuple[int, Action], int]:
    return {
        (device, action): index for device in _range(schedule) for index, action in enumerate(schedule.devices[device])
    }


def _range(schedule: Schedule) -> range:
    return range(len(schedule.devices))
