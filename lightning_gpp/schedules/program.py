"""A program: a schedule with all its communication, as plain data; verified, simulated, drawn and executed.

Messages between two devices match by order alone, per direction: the n-th send from a to b meets the n-th receive of b
from a. There are no tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The tensors of one edge of the stage graph for the samples `[start, stop)` of the mini-batch.

    `edge` indexes `plan.edges`. `gradient`: they are gradients and travel from the edge's dst to its src.
    `producer` ran on device `src` and made them, `consumer` will run on device `dst` and read them. A message with
    `src == dst` stays on its device and needs no instruction.
    """

    id: int
    edge: int
    gradient: bool
    start: int
    stop: int
    src: int
    dst: int
    producer: Action
    consumer: Action


class Op(Enum):
    """The operation of an instruction."""

    COMPUTE = "compute"
    SEND = "send"
    """Start sending; computing goes on at once."""
    POST = "post"
    """Start receiving: allocate the buffer; computing goes on at once."""
    WAIT = "wait"
    """Wait until a posted message has arrived."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a device: `action` for COMPUTE, `message` (its id) for the others."""

    op: Op
    action: Action | None = None
    message: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions of every device of one pipeline replica, for one mini-batch of `batch_size` samples.

    A program that flushes begins and ends with an empty pipeline. The devices of a *continuous* one repeat their
    instructions, once per mini-batch: `ahead[device][i]` is the number of mini-batches by which instruction i is ahead
    of the one that this period completes; it is empty if none is ahead.

    `inputs[device, action]` lists the ids of the messages (local ones too) that an action reads, `outputs[device,
    action]` those that it produces. `split`: stages and micro-batches whose backward is split. `reduced`: stages whose
    gradients this program reduces over ranks.
    """

    plan: Plan
    batch_size: int
    training: bool
    messages: tuple[Message, ...]
    devices: tuple[tuple[Instruction, ...], ...]
    inputs: dict[tuple[int, Action], tuple[int, ...]]
    outputs: dict[tuple[int, Action], tuple[int, ...]]
    split: frozenset[tuple[int, int]] = frozenset()
    reduced: frozenset[int] = frozenset()
    ahead: tuple[tuple[int, ...], ...] = ()

    @property
    def lead(self) -> int:
        """The most mini-batches by which any device is ahead; 0 if the program flushes."""
        return max((number for row in self.ahead for number in row), default=0)

    def lead_of(self, device: int) -> int:
        """The most mini-batches by which a device is ahead."""
        return max(self.ahead_of(device), default=0)

    def ahead_of(self, device: int) -> tuple[int, ...]:
        """The mini-batches by which each of a device's instructions is ahead."""
        return self.ahead[device] if self.ahead else (0,) * len(self.devices[device])


def describe(message: Message) -> str:
    """A message in words, for error messages."""
    content = "gradients" if message.gradient else "tensors"
    samples = f"samples [{message.start}, {message.stop})"
    return f"message {message.id} ({content} of {samples}, {message.producer} to {message.consumer})"
