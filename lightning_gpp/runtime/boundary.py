"""Boundaries between actions and messages: cuts the tensors of an action into messages, and joins messages into
tensors.

An action works on an interval of samples. On every edge, the messages that it reads (or produces) tile this interval. A
tensor that grows with the samples is cut and joined along its batch dimension. A tensor that does not depend on the
samples is carried by every message: a reader takes the first copy, so its gradient goes back on the first message,
zeros on the others. A tensor that combines samples (a loss) never occurs here: its edge is not `sliceable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_gpp.errors import ScheduleError, ShapeError
from lightning_gpp.graph import Affine, TensorSpec
from lightning_gpp.graph.operator_graph import DTYPE_BYTES
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.runtime.stage import Slot
from lightning_gpp.schedules.program import Message, Program

Tensors = Sequence[Tensor | None]
"""The tensors of a message, one for each of its slots. For gradients, None if there is none."""

MessageTensors = list[Tensors | None]
"""The tensors of all messages of a device, by message id; None if they have not arrived, or are no longer needed."""

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES}

TOKEN: Final = Slot("@token", TensorSpec(shape=(Affine(0, 1),), dtype="uint8"))
"""The tensor of an artificial edge, which carries nothing but the order."""


def carried(edge: Edge, slots: Sequence[Slot], gradient: bool) -> tuple[Slot, ...]:
    """The slots of a message."""
    if edge.artificial:
        return (TOKEN,)
    if gradient:
        return tuple(slot for slot in slots if slot.spec.requires_grad)
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class _MessageInterval:
    message: int
    offset: int
    length: int


class EdgeTensors:
    """The messages of one edge that one action reads or produces, in the order of their samples, which they tile.

    Args:
        program: the program that they belong to.
        messages: all messages of the edge that the action reads, or all that it produces.
        slots: the edge's slots.
        interval: the action's samples.
    """

    def __init__(
        self, program: Program, messages: Sequence[Message], slots: Sequence[Slot], interval: tuple[int, int]
    ) -> None:
        messages = sorted(messages, key=lambda message: message.start)
        self.edge_index = messages[0].edge
        self.edge = program.plan.edges[self.edge_index]
        self.gradient, self.of_slices = messages[0].gradient, program.plan.is_sliced
        self.slots = carried(self.edge, slots, self.gradient)
        self._pieces = [_MessageInterval(m.id, m.start - interval[0], m.stop - m.start) for m in messages]
        self._only = messages[0].id if len(messages) == 1 else None

    def take(self, values: MessageTensors) -> Tensors:
        """Join the tensors of the action, one per slot; the messages are dropped."""
        if self._only is not None:
            return _pop(values, self._only)
        parts = [_pop(values, piece.message) for piece in self._pieces]
        return [self._join(slot, [part[i] for part in parts]) for i, slot in enumerate(self.slots)]

    def give(self, tensors: Tensors, values: MessageTensors) -> None:
        """Cut the tensors of the action into messages."""
        if self._only is not None:
            values[self._only] = tensors
            return
        for number, piece in enumerate(self._pieces):
            pairs = zip(self.slots, tensors, strict=True)
            values[piece.message] = [self._cut(slot, tensor, piece, number) for slot, tensor in pairs]

    def _join(self, slot: Slot, parts: Sequence[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        if not present:
            return None
        if slot.spec.varies:
            return torch.cat(present, dim=slot.spec.batch_dim or 0)
        return total(present) if self.gradient else present[0]

    def _cut(self, slot: Slot, tensor: Tensor | None, piece: _MessageInterval, number: int) -> Tensor | None:
        if tensor is None:
            return None
        if slot.spec.varies:
            return tensor.narrow(slot.spec.batch_dim or 0, piece.offset, piece.length)
        return torch.zeros_like(tensor) if self.gradient and number else tensor


def hand_out(
    made: Mapping[str, Tensor | None], outgoing: Iterable[EdgeTensors], values: MessageTensors, token: Tensor
) -> None:
    """Cut what an action has made into messages: results by name, or gradients of inputs.

    `token`: the tensor that artificial edges carry.
    """
    for border in outgoing:
        tensors = [token] if border.edge.artificial else [made.get(slot.name) for slot in border.slots]
        border.give(tensors, values)


def hand_out_zeros(
    outgoing: Iterable[EdgeTensors], num_samples: int, values: MessageTensors, device: torch.device
) -> None:
    """Make messages with which nobody will compute."""
    for border in outgoing:
        forms = ((slot.spec.sizes(num_samples), DTYPES[slot.spec.dtype]) for slot in border.slots)
        border.give([torch.zeros(sizes, dtype=dtype, device=device) for sizes, dtype in forms], values)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of tensors, in the given order; they stay unchanged."""
    first, *rest = tensors
    for tensor in rest:
        first = first + tensor
    return first


def borders(
    program: Program, ids: Iterable[int], slots: Sequence[Sequence[Slot]], interval: tuple[int, int]
) -> list[EdgeTensors]:
    """One border per edge for the messages `ids` of an action, edges in the order of the plan."""
    by_edge: dict[int, list[Message]] = {}
    for message in (program.messages[i] for i in ids):
        by_edge.setdefault(message.edge, []).append(message)
    return [EdgeTensors(program, by_edge[edge], slots[edge], interval) for edge in sorted(by_edge)]


def _pop(values: MessageTensors, message: int) -> Tensors:
    tensors, values[message] = values[message], None
    if tensors is None:
        raise ScheduleError(f"Message {message} is read before it has arrived, or twice: the program was not verified.")
    return tensors


def describe_edge(plan: Plan, edge: Edge) -> str:
    source = "the data" if edge.src == SOURCE else f"stage {plan.stages[edge.src].name!r}"
    return f"the edge from {source} to stage {plan.stages[edge.dst].name!r}"


Promise = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor that a stage has to return."""


def promises(outgoing: Iterable[EdgeTensors], num_samples: int) -> list[Promise]:
    """The tensors that an action must return for its outgoing edges."""
    slots = {slot.name: slot for border in outgoing for slot in border.slots}
    slots.pop(TOKEN.name, None)
    return [(name, slot.spec.sizes(num_samples), DTYPES[slot.spec.dtype]) for name, slot in slots.items()]


def check_promises(outputs: Mapping[str, Tensor], promised: Iterable[Promise], owner: str) -> None:
    """Raise ShapeError if a returned tensor is missing or not as promised: a transport would truncate it silently."""
    for name, shape, dtype in promised:
        tensor = outputs.get(name)
        if tensor is None:
            raise ShapeError(f"{owner} did not return {name!r}; it returned {sorted(outputs)}.")
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise ShapeError(
                f"{owner} returned {name!r} with shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected are "
                f"{shape} and {dtype}. Only the number of samples may change between batches: pad the batch to the "
                "captured sizes."
            )


class DeviceState:
    """State that all actions of a device share, for all mini-batches.

    Attributes:
        token: the tensor that artificial edges carry.
        steady: whether the current period is complete; it is not while a continuous pipeline fills or drains.
    """

    def __init__(self, device: torch.device) -> None:
        self.token = torch.zeros(1, dtype=torch.uint8, device=device)
        self.steady = True
