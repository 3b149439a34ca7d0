"""Operations: the executable form of a program's actions on a device. Everything that does not change from one
mini-batch to the next is looked up when they are made; `run()` only moves tensors.

An action works on an interval of samples. On every edge, the messages that it reads (or produces) tile this interval. A
tensor that grows with the samples is cut and joined along its batch dimension. A tensor that does not depend on the
samples is carried by every message: a reader takes the first copy, so its gradient goes back on the first message,
zeros on the others. A tensor that combines samples (a loss) never occurs here: its edge is not `sliceable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpp._compat.torch import FakeTensor, as_result
from lightning_gpp.errors import GPPError, ScheduleError, ShapeError
from lightning_gpp.runtime.boundary import DTYPES, DeviceState, MessageTensors, Tensors, carried
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.split import SplitBackward
from lightning_gpp.runtime.stage import DataSource, MicroBatch, Slot, StageForward, StageModule
from lightning_gpp.schedules.program import Message, Program


class State:
    """State of one mini-batch on a device.

    Attributes:
        device: the state that mini-batches share.
        values: the tensors of all messages.
        loss_weight: weight of one sample in the loss, gradient scale included.
        step: number of the mini-batch, which also numbers the random streams.
        keeps_graphs: whether another backward follows for the same forwards.
    """

    def __init__(self, num_messages: int, device: DeviceState) -> None:
        self.device = device
        self.values: MessageTensors = [None] * num_messages
        self.loss_weight, self.step, self.keeps_graphs = 1.0, 0, False

    def begin(self, loss_weight: float, step: int) -> None:
        """Take the next mini-batch."""
        self.loss_weight, self.step = loss_weight, step

    def clear(self) -> None:
        """Drop every tensor."""
        self.values[:] = [None] * len(self.values)


class Saved:
    """State that a forward keeps for its backward: the leaves that collect gradients, the edges at which gradients
    enter, and the losses with their seed gradients. Outputs are not kept: autograd needs only their edges.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.outputs: dict[str, GradientEdge] = {}
        self.losses: dict[str, tuple[GradientEdge, Tensor]] = {}


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
        self.edge = program.plan.edges[messages[0].edge]
        self.gradient, self.of_slices = messages[0].gradient, program.plan.is_sliced
        self.slots = carried(self.edge, slots, self.gradient)
        self._parts = [(each.id, each.start - interval[0], each.stop - each.start) for each in messages]
        self._only = messages[0].id if len(messages) == 1 else None

    def take(self, values: MessageTensors) -> Tensors:
        """Join the tensors of the action, one per slot; the messages are dropped."""
        if self._only is not None:
            return _pop(values, self._only)
        parts = [_pop(values, message) for message, _, _ in self._parts]
        return [self._join(slot, [part[i] for part in parts]) for i, slot in enumerate(self.slots)]

    def give(self, tensors: Tensors, values: MessageTensors) -> None:
        """Cut the tensors of the action into messages."""
        if self._only is not None:
            values[self._only] = tensors
            return
        for message, offset, length in self._parts:
            pairs = zip(self.slots, tensors, strict=True)
            values[message] = [self._cut(slot, tensor, offset, length) for slot, tensor in pairs]

    def _join(self, slot: Slot, parts: Sequence[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        if not present:
            return None
        if slot.spec.varies:
            return torch.cat(present, dim=slot.spec.batch_dim or 0)
        return sum(present[1:], present[0]) if self.gradient else present[0]

    def _cut(self, slot: Slot, tensor: Tensor | None, offset: int, length: int) -> Tensor | None:
        if tensor is None:
            return None
        if slot.spec.varies:
            return tensor.narrow(slot.spec.batch_dim or 0, offset, length)
        return torch.zeros_like(tensor) if self.gradient and offset else tensor


def _pop(values: MessageTensors, message: int) -> Tensors:
    tensors, values[message] = values[message], None
    if tensors is None:
        raise ScheduleError(f"Message {message} is read before it has arrived, or twice: the program was not verified.")
    return tensors


def borders(
    program: Program, ids: Iterable[int], slots: Sequence[Sequence[Slot]], interval: tuple[int, int]
) -> list[EdgeTensors]:
    """One border per edge for the messages `ids` of an action, edges in the order of the plan."""
    by_edge: dict[int, list[Message]] = {}
    for message in (program.messages[i] for i in ids):
        by_edge.setdefault(message.edge, []).append(message)
    return [EdgeTensors(program, by_edge[edge], slots[edge], interval) for edge in sorted(by_edge)]


@dataclass(slots=True, kw_only=True, eq=False)
class Compute:
    """Base class of actions on a share of a micro-batch, with messages in and out. `owner` names it in errors."""

    state: State
    owner: str
    micro_batch: MicroBatch
    incoming: list[EdgeTensors]
    outgoing: list[EdgeTensors]

    def hand_out(self, made: Mapping[str, Tensor | None]) -> None:
        """Cut what was made into messages: results by name, or gradients of inputs."""
        values, token = self.state.values, self.state.device.token
        for border in self.outgoing:
            border.give([token] if border.edge.artificial else [made.get(slot.name) for slot in border.slots], values)

    def hand_out_zeros(self) -> None:
        """Make messages with which nobody will compute."""
        number, device = self.micro_batch.num_samples, self.state.device.token.device
        slots = (slot for border in self.outgoing for slot in border.slots)
        forms = {slot.name: (slot.spec.sizes(number), DTYPES[slot.spec.dtype]) for slot in slots}
        self.hand_out({name: torch.zeros(sizes, dtype=dtype, device=device) for name, (sizes, dtype) in forms.items()})


@dataclass(slots=True, kw_only=True, eq=False)
class _Makes(Compute):
    """Base class of actions whose results have the shapes and dtypes that the slots of their edges promise."""

    promised: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(init=False)

    def __post_init__(self) -> None:
        slots = {
            slot.name: slot.spec for border in self.outgoing if not border.edge.artificial for slot in border.slots
        }
        number = self.micro_batch.num_samples
        self.promised = {name: (spec.sizes(number), DTYPES[spec.dtype]) for name, spec in slots.items()}

    def check(self, outputs: Mapping[str, Tensor], owner: str) -> None:
        """Raise ShapeError if a result is missing or not as promised: a transport would truncate it silently."""
        for name, (shape, dtype) in self.promised.items():
            tensor = outputs.get(name)
            if tensor is None:
                raise ShapeError(f"{owner} did not return {name!r}; it returned {sorted(outputs)}.")
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise ShapeError(
                    f"{owner} returned {name!r} with shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
                    f"expected are {shape} and {dtype}. Only the number of samples may change between batches: pad the "
                    "batch to the captured sizes."
                )


_NO_VALUES: Final = (
    "A tensor that the step passes to a module has no values: it was made while the step was captured, and kept since "
    "by something that set-up does not know, such as a generator in a tuple, in an object of yours or in a global "
    "variable. Keep the iterator itself as an attribute of the module (self.items = iter(...)), and call next() in "
    "the step."
)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadData(_Makes):
    """Run the user's step up to the inputs of the network, and send these."""

    source: DataSource

    def run(self) -> None:
        outputs = self.source.inputs(self.micro_batch)
        if any(isinstance(value, FakeTensor) for value in outputs.values()):
            raise GPPError(_NO_VALUES)
        self.check(outputs, self.owner)
        self.hand_out(outputs)


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeForward(_Makes):
    """Run a stage; in training, keep the state for the backward.

    `differentiable` names the outputs that will get gradients, `losses` those at which the backward starts; `saved` is
    None in inference.
    """

    forward: StageForward
    saved: Saved | None
    differentiable: tuple[str, ...]
    losses: tuple[str, ...]

    def run(self) -> None:
        saved = self.saved
        outputs = self.forward(self._inputs(saved), self.micro_batch)
        self.check(outputs, self.owner)
        self.hand_out(outputs)
        if saved is not None:
            self._save(saved, outputs)

    def _inputs(self, saved: Saved | None) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for border in self.incoming:
            tensors = border.take(self.state.values)
            if border.edge.artificial:
                continue
            for slot, tensor in zip(border.slots, tensors, strict=True):
                if tensor is None:
                    continue
                leaf = inputs[slot.name] = _as_received(tensor, border)
                if saved is not None and slot.spec.requires_grad:
                    saved.leaves[slot.name] = leaf.requires_grad_()
                    inputs[slot.name] = as_result(leaf, leaf.shape)
        return inputs

    def _save(self, saved: Saved, outputs: Mapping[str, Tensor]) -> None:
        for name in self.differentiable:
            output = outputs.get(name)
            if output is not None and output.requires_grad:
                saved.outputs[name] = get_gradient_edge(output)
        for name in self.losses:
            loss = outputs.get(name)
            if loss is None or loss.requires_grad or not self._adds_losses:
                loss = _checked_loss(loss, self.owner)
                seed = torch.full_like(loss, self.state.loss_weight * self.micro_batch.num_samples)
                saved.losses[name] = get_gradient_edge(loss), seed

    @property
    def _adds_losses(self) -> bool:
        """True if the loss may be the sum of others' alone, which start their own backwards."""
        return any(slot.spec.local_loss for border in self.incoming for slot in border.slots)


def _as_received(tensor: Tensor, border: EdgeTensors) -> Tensor:
    """A tensor without its history, in the order of memory in which it would come from another device.

    The numbers that dropout draws, and the last bits of products, depend on that order, but must not on the devices.
    Slices of a stage, which are always on one device, hand on memory that they fill together.
    """
    return tensor.detach() if border.of_slices else tensor.detach().contiguous()


def _checked_loss(loss: Tensor | None, owner: str) -> Tensor:
    if loss is None:
        raise GPPError(
            f"{owner} returned no loss. In a pipeline the step must return a loss for every micro-batch: a skipped "
            "micro-batch would leave the other stages without gradients. Return a loss that is multiplied with zero."
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise GPPError(
            f"{owner} returned a loss of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}; it must "
            "be one number that depends on parameters that are trained."
        )
    return loss


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeGradients(Compute):
    """Run autograd from the gradients of all consumers, and from the loss."""

    saved: Saved

    def _roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges at which gradients enter the stage's graph, and these gradients."""
        gradients, saved = self._collect(), self.saved
        names = [name for name in gradients if name in saved.outputs]
        roots = [saved.outputs[name] for name in names]
        seeds = [gradients[name] for name in names]
        roots += [root for root, _ in saved.losses.values()]
        seeds += [seed for _, seed in saved.losses.values()]
        return roots, seeds

    def _collect(self) -> dict[str, Tensor]:
        """The sum of the gradients that each output's consumers sent, in the order of the edges."""
        gradients: dict[str, Tensor] = {}
        for border in self.incoming:
            tensors = border.take(self.state.values)
            for slot, tensor in zip(border.slots, tensors, strict=True):
                if tensor is not None:
                    name, tensor = slot.name, _as_received(tensor, border)
                    gradients[name] = gradients[name] + tensor if name in gradients else tensor
        return gradients

    def _end(self) -> None:
        """Hand out the gradients of the inputs; a leaf on which nothing depends has gradient zero."""
        if self.saved.leaves:
            self.hand_out({name: _gradient(leaf) for name, leaf in self.saved.leaves.items()})
        else:
            self.hand_out_zeros()
        self.saved.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeBackward(ComputeGradients):
    """A full backward, to the inputs and the parameters."""

    def run(self) -> None:
        roots, seeds = self._roots()
        if roots:
            torch.autograd.backward(roots, seeds, retain_graph=self.state.keeps_graphs)
        self._end()


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeInput(ComputeGradients):
    """A backward to the inputs; parameters only get gradients that fall out on the way."""

    split: SplitBackward

    def run(self) -> None:
        roots, seeds = self._roots()
        self.split.input_gradients(roots, seeds, self.saved.leaves)
        self._end()


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


Operation = Callable[[], object]


def nothing() -> None:
    """Do nothing: the share of a replica without samples."""


def after(before: Operation, operation: Operation) -> Operation:
    """An operation, and what has to come right before it."""

    def run() -> None:
        before()
        operation()

    return run


def drawing(stage: StageModule, streams: RandomStreams, state: State, place: tuple[int, int, int]) -> StageForward:
    """The forward of a stage inside its random stream. `place`: stage, pipeline and first sample."""

    def forward(values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        with streams.use(*place, state.step):
            return stage.forward(values, micro_batch)

    return forward
