"""The program of all devices on a single one: a pipeline's order and delays without the pipeline.

In period t no device waits for work of another one in a later period. So one device can run the periods of all devices
in turn, and then one optimizer step: every forward and backward sees the same weights as in the pipeline. This is the
reference in tests of asynchronous training.

Every replica of a stage has micro-batches of its own: one that r replicas share becomes r micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import Plan, Stage
from lightning_gpp.plan_parts import even_parts
from lightning_gpp.schedules.actions import COLLECTIVES, Action, Kind, Schedule
from lightning_gpp.schedules.continuous import assembled, prove
from lightning_gpp.schedules.lowering import derive_messages, lower
from lightning_gpp.schedules.program import Instruction, Op, Program
from lightning_gpp.schedules.verifier import verify


def on_one_device(program: Program) -> Program:
    """The same mini-batches, in the same order and with the same delays, on device 0 alone.

    Raises:
        PlanError: the replicas of a stage have shares of unequal size.
    """
    total = program.batch_size
    plan = plan_on_one_device(program.plan, total)
    order = _order(program)
    actions = list(_with_data(plan, total, order))
    if not program.ahead:
        merged = lower(plan, Schedule((tuple(action for action, _ in actions),)), total)
        verify(merged)
        return merged
    row = tuple((Instruction(Op.COMPUTE, action=action), ahead) for action, ahead in actions)
    merged = assembled(plan, total, [row])
    prove(merged)
    return merged


def plan_on_one_device(plan: Plan, batch_size: int | None = None) -> Plan:
    """The plan of the same stages on device 0 alone, for mini-batches of this size.

    Raises:
        PlanError: the replicas of a stage have shares of unequal size.
    """
    total = plan.batch_size if batch_size is None else batch_size
    return replace(plan, stages=tuple(_stage(plan, i, total) for i in range(len(plan.stages))), memory_bytes=())


def _stage(plan: Plan, index: int, total: int) -> Stage:
    stage, shares = plan.stages[index], _shares(plan, index, total)
    size = shares[0][1] - shares[0][0]
    if shares != even_parts(total, size):
        raise PlanError(
            f"Stage {stage.name!r} has {len(stage.devices)} replicas, whose shares of a mini-batch of {total} samples "
            f"are not equally large ({', '.join(str(stop - start) for start, stop in shares)}): one device cannot "
            "compute the same. Choose a micro_batch_size that the replicas divide (strategy.stages, "
            "strategy.micro_batch_size), and leave out a smaller last mini-batch (drop_last=True of the data loader)."
        )
    return replace(stage, devices=(0,), micro_batch_size=size, round_robin=False)


def _shares(plan: Plan, stage: int, total: int) -> list[tuple[int, int]]:
    """The samples that each replica of a stage computes at a time, which are the micro-batches of the single device."""
    numbers = range(len(plan.intervals(stage, total)))
    shares = [plan.share(stage, device, number, total) for number in numbers for device in plan.stages[stage].devices]
    return sorted((start, stop) for start, stop in shares if start < stop)


def _order(program: Program) -> list[tuple[Action, int]]:
    """The actions of one period of all devices, without data actions, in an order in which one device can run them.

    Each comes with the mini-batches by which it is ahead. An action waits for those before it on its device, and for
    those of the same period whose results it reads.
    """
    plan, total, order = program.plan, program.batch_size, nx.DiGraph()
    ahead: dict[tuple[int, Action], int] = {}
    for device, row in enumerate(program.devices):
        found = zip(row, program.ahead_of(device), strict=True)
        own = {(device, each.action): number for each, number in found if each.action is not None}
        nx.add_path(order, own)
        ahead |= own
    ends = [((message.src, message.producer), (message.dst, message.consumer)) for message in program.messages]
    order.add_edges_from((src, dst) for src, dst in ends if ahead[src] == ahead[dst])
    actions = []
    for device, action in nx.topological_sort(order):
        if action.kind not in (*COLLECTIVES, Kind.DATA):
            share = plan.share(action.stage, device, action.micro_batch, total)
            if share[0] < share[1]:
                actions.append((action.at(_shares(plan, action.stage, total).index(share)), ahead[device, action]))
    return actions


def _with_data(plan: Plan, batch_size: int, actions: list[tuple[Action, int]]) -> Iterator[tuple[Action, int]]:
    """Insert data actions right before their first readers. In a pipeline the device that reads data may be ahead."""
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
