"""Messages between stages, derived from sample intervals by one rule for every shape of plan.

The parts of a stage, one for each micro-batch and replica, tile the samples of the mini-batch. An edge of the stage
graph moves the common refinement of the tilings of its two ends. This covers different micro-batch sizes, different
numbers of replicas, fan-in and fan-out.

    producer, b=4, 1 replica    |       0       |       1       |
    consumer, b=6, 2 replicas   |     0     |     0     |   1   |   1   |  (replicas 0, 1, 0, 1)
    messages                    |     *     | * |   *   |   *   |   *   |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpp.errors import PlanError
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.program import Message

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
    """All parts of a stage, or of SOURCE, by samples: together they tile the mini-batch."""
    parts = []
    for number, interval in enumerate(plan.intervals(stage, batch_size)):
        for device in plan.devices_of(stage):
            start, stop = plan.share(stage, device, interval)
            if start < stop:
                parts.append(Part(number, device, start, stop))
    return parts


def samples_of(plan: Plan, stage: int, device: int, batch_size: int) -> list[int]:
    """For every micro-batch of a stage the number of samples that the replica on `device` works on; may be 0."""
    shares = (plan.share(stage, device, interval) for interval in plan.intervals(stage, batch_size))
    return [stop - start for start, stop in shares]


def derive_messages(plan: Plan, batch_size: int, training: bool, split: Split = frozenset()) -> tuple[Message, ...]:
    """All messages of one mini-batch, including those that stay on their device; by edge, forward ones first.

    Raises:
        PlanError: an edge whose tensors cannot be cut joins stages with different micro-batches or replicas.
    """
    messages: list[Message] = []
    for index, edge in enumerate(plan.edges):
        pairs = list(_common(parts_of(plan, edge.src, batch_size), parts_of(plan, edge.dst, batch_size)))
        if (edge.dynamic or not edge.sliceable) and not edge.artificial:
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
    reason = "known only at run time" if edge.dynamic else "not one index per sample"
    raise PlanError(
        f"{_end(plan, edge.src)} sends tensors to {_end(plan, edge.dst)} whose sizes are {reason}, so they cannot be "
        "cut into other micro-batches. Give both stages the same micro_batch_size and the same number of devices "
        "(strategy.stages), or put the modules into one stage."
    )


def _end(plan: Plan, index: int) -> str:
    stage = plan.stages[plan.step_stage if index == SOURCE else index]
    name = f"The data source (on the devices of stage {stage.name!r})" if index == SOURCE else f"Stage {stage.name!r}"
    return f"{name} (micro_batch_size {stage.micro_batch_size}, {len(stage.devices)} replicas)"
