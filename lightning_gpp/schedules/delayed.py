"""The program of all devices on one: a pipeline's order and delays without the pipeline.

In period t no device waits for anything that another one does in a later period. So one device can do the periods of
all devices in turn, and then one optimizer step: every forward and backward then sees the weights that it would see in
the pipeline. That is what asynchronous training is tested against, and a way to try a pipeline's staleness on a laptop.

A replica of a stage becomes a micro-batch: the samples of a micro-batch that r replicas share are r micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import Plan, Stage
from lightning_gpp.schedules.actions import COLLECTIVES, Action, Kind, Schedule
from lightning_gpp.schedules.continuous import assembled, prove, unrolled
from lightning_gpp.schedules.lowering import derive_messages, lower
from lightning_gpp.schedules.program import Instruction, Op, Program
from lightning_gpp.schedules.replay import replay
from lightning_gpp.schedules.verifier import verify


def on_one_device(program: Program) -> Program:
    """The same mini-batches, in the same order and with the same delays, on device 0 alone.

    Raises:
        PlanError: the replicas of a stage have shares of unequal size.
    """
    plan, total = plan_on_one_device(program.plan), program.batch_size
    actions = list(_with_data(plan, total, _order(program)))
    if not program.ahead:
        merged = lower(plan, Schedule((tuple(action for action, _ in actions),)), total)
        verify(merged)
        return merged
    row = tuple((Instruction(Op.COMPUTE, action=action), ahead) for action, ahead in actions)
    merged = assembled(plan, total, [row])
    prove(merged)
    return merged


def plan_on_one_device(plan: Plan) -> Plan:
    """The plan of the same stages on device 0 alone.

    Raises:
        PlanError: the replicas of a stage have shares of unequal size.
    """
    return replace(plan, stages=tuple(map(_stage, plan.stages)), memory_bytes=())


def _stage(stage: Stage) -> Stage:
    shares = 1 if stage.round_robin else len(stage.devices)
    if stage.micro_batch_size % shares:
        raise PlanError(
            f"Stage {stage.name!r} has {shares} replicas, which do not divide its micro-batches of "
            f"{stage.micro_batch_size} samples: one device cannot compute the same. Choose a micro_batch_size that they"
            " divide (strategy.stages, strategy.micro_batch_size)."
        )
    return replace(stage, devices=(0,), micro_batch_size=stage.micro_batch_size // shares, round_robin=False)


def _order(program: Program) -> list[tuple[Action, int]]:
    """The actions of one period of all devices, in an order in which one device can run them; without the data."""
    period, written_out = 0, program
    if program.ahead:
        period = program.lead + 1
        written_out = unrolled(program, 2 * period)
    places = [_places(program, device, 2 * period) for device in range(len(program.devices))]
    found: list[tuple[Action, int]] = []

    def visit(device: int, instruction: Instruction) -> None:
        position, turn = next(places[device])
        action = program.devices[device][position].action
        if turn == period and action is not None and action.kind not in (*COLLECTIVES, Kind.DATA):
            ahead = program.ahead[device][position] if program.ahead else 0
            found.append((_renumbered(program.plan, device, action), ahead))

    replay(written_out, visit)
    return found


def _with_data(plan: Plan, batch_size: int, actions: list[tuple[Action, int]]) -> Iterator[tuple[Action, int]]:
    """Data are read right before they are needed first. In a pipeline the device that reads them may be ahead."""
    needed: dict[Action, list[Action]] = {}
    for message in derive_messages(plan, batch_size, training=False):
        if message.producer.kind is Kind.DATA:
            needed.setdefault(message.consumer, []).append(message.producer)
    read: set[tuple[Action, int]] = set()
    most = {data: max(ahead for action, ahead in actions if data in needed.get(action, ())) for data in _data(needed)}
    for action, ahead in actions:
        for data in needed.get(action, ()):
            if most[data] == ahead and (data, ahead) not in read:
                read.add((data, ahead))
                yield data, ahead
        yield action, ahead


def _data(needed: Mapping[Action, list[Action]]) -> set[Action]:
    return {data for listed in needed.values() for data in listed}


def _places(program: Program, device: int, number: int) -> Iterator[tuple[int, int]]:
    """Position in the period, and number of the period, of every instruction of the written-out program."""
    if not program.ahead:
        yield from ((position, 0) for position in range(len(program.devices[device])))
        return
    for period in range(-program.lead_of(device), number):
        for position, ahead in enumerate(program.ahead[device]):
            if 0 <= period + ahead < number:
                yield position, period


def _renumbered(plan: Plan, device: int, action: Action) -> Action:
    stage = plan.stages[action.stage]
    if stage.round_robin:
        return action
    shares, replica = len(stage.devices), stage.devices.index(device)
    return action._replace(micro_batch=action.micro_batch * shares + replica)
