"""Proves that the messages of a program carry every sample that every action needs, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lightning_gpp.errors import VerificationError
from lightning_gpp.schedules.messages import Part, carries_gradient, message_between, parts_of
from lightning_gpp.schedules.program import Message, Program, describe

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
        raise VerificationError("The program holds the same message twice.")
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
