"""Lowering: inserts messages, and the instructions that move them, into a schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import COLLECTIVES, Action, Kind, Schedule
from lightning_gpp.schedules.messages import Split, derive_messages
from lightning_gpp.schedules.program import Instruction, Message, Op, Program

Links = dict[tuple[int, Action], tuple[int, ...]]
Posts = dict[tuple[int, int], list[int]]
"""Messages (ids) that a device posts before its n-th action: `posts[device, n]`."""


def lower(
    plan: Plan, schedule: Schedule, batch_size: int | None = None, training: bool = True, lookahead: int = 2
) -> Program:
    """Insert all communication into a schedule.

    A message is sent right after the action that produces it and waited for right before the action that reads it. Its
    buffer is posted `lookahead` actions before that one, so that it can arrive while the device computes; earlier if a
    later message from the same device needs it, because messages between two devices match by order alone. Posts
    never wait, so receivers delay nobody: a program can deadlock only if the schedule does.

    Args:
        plan: the plan.
        schedule: the order of actions on every device.
        batch_size: samples of the mini-batch of one pipeline replica; the plan's own by default.
        training: whether the schedule holds backwards.
        lookahead: actions between posting a buffer and reading it.

    Raises:
        ScheduleError: the schedule does not run what the plan needs.
        PlanError: tensors that cannot be cut would have to be.
    """
    total = plan.batch_size if batch_size is None else batch_size
    split = split_of(schedule)
    _check_schedule(plan, schedule, total, training, split)
    messages = derive_messages(plan, total, training, split)
    inputs, outputs = _links(schedule, messages)
    posts = _posts(schedule, messages, outputs, lookahead)
    devices = tuple(_instructions(device, schedule, messages, inputs, outputs, posts) for device in _range(schedule))
    return Program(
        plan=plan,
        batch_size=total,
        training=training,
        messages=messages,
        devices=devices,
        inputs=inputs,
        outputs=outputs,
        split=split,
        reduced=frozenset(a.stage for actions in schedule.devices for a in actions if a.kind is Kind.REDUCE),
    )


def required_actions(
    plan: Plan, device: int, batch_size: int, training: bool, split: Split = frozenset()
) -> list[Action]:
    """The actions that a device has to run for one mini-batch, in no order."""
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
    again = (Kind.RECOMPUTE,) if plan.stages[stage].recompute else ()
    return (*again, Kind.INPUT, Kind.WEIGHT) if split else (*again, Kind.BACKWARD)


def difference(required: Iterable[Action], present: Iterable[Action]) -> str:
    """The actions that are missing or too many, in words; empty if there are none."""
    wanted, given = Counter(required), Counter(present)
    missing, extra = (" ".join(map(str, part)) for part in (wanted - given, given - wanted))
    parts = [f"lacks {missing}"] * bool(missing) + [f"has one too many of {extra}"] * bool(extra)
    return " and ".join(parts)


def _check_schedule(plan: Plan, schedule: Schedule, batch_size: int, training: bool, split: Split) -> None:
    if len(schedule.devices) != plan.num_devices:
        raise ScheduleError(f"The schedule is for {len(schedule.devices)} devices, the plan needs {plan.num_devices}.")
    for device, actions in enumerate(schedule.devices):
        computed = [action for action in actions if action.kind not in COLLECTIVES]
        problem = difference(required_actions(plan, device, batch_size, training, split), computed)
        if problem:
            raise ScheduleError(
                f"The schedule of device {device} {problem}; the plan needs each micro-batch of {batch_size} samples "
                f"once (training={training}). Make it with make_schedule(plan, {batch_size}, training={training})."
            )


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


def _posts(schedule: Schedule, messages: tuple[Message, ...], outputs: Links, lookahead: int) -> Posts:
    position = _positions(schedule)
    posts: Posts = defaultdict(list)
    for (_, receiver), channel in sorted(_channels(schedule, messages, outputs).items()):
        points = [max(0, position[receiver, messages[number].consumer] - lookahead) for number in channel]
        for i in reversed(range(len(points) - 1)):
            points[i] = min(points[i], points[i + 1])
        for number, point in zip(channel, points, strict=True):
            posts[receiver, point].append(number)
    return posts


def _channels(schedule: Schedule, messages: tuple[Message, ...], outputs: Links) -> dict[tuple[int, int], list[int]]:
    """For every directed pair of devices its messages in the order in which they are sent."""
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
