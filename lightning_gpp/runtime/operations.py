"""Operations: the executable form of a program's actions on a device. Everything that does not change from one
mini-batch to the next is looked up when they are made; `run()` only moves tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpp._compat.torch import FakeTensor
from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.boundary import DeviceState, EdgeTensors, MessageTensors, Promise, check_promises, hand_out
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.split import SplitBackward
from lightning_gpp.runtime.stage import DataSource, MicroBatch, StageForward, StageModule, as_result
from lightning_gpp.runtime.weights.policy import Use, WeightPolicy
from lightning_gpp.schedules.actions import Action, Kind


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
        self.losses: list[tuple[GradientEdge, Tensor]] = []


@dataclass(slots=True, kw_only=True, eq=False)
class Compute:
    """Base class of actions on a share of a micro-batch, with messages in and out. `owner` names it in errors."""

    state: State
    owner: str
    stage: int
    micro_batch: MicroBatch
    incoming: list[EdgeTensors]
    outgoing: list[EdgeTensors]


_NO_VALUES: Final = (
    "A tensor that the step passes to a module has no values: it was made while the step was captured, and kept since "
    "by something that set-up does not know, such as a generator in a tuple, in an object of yours or in a global "
    "variable. Make the tensor in the step, or keep the iterator itself as an attribute of the module, or in a list or "
    "dictionary there (self.items = iter(...)), and call next()."
)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadData(Compute):
    """Run the user's step up to the inputs of the network, and send these."""

    source: DataSource
    promised: list[Promise]

    def run(self) -> None:
        outputs = self.source.inputs(self.micro_batch)
        if any(isinstance(value, FakeTensor) for value in outputs.values()):
            raise GPPError(_NO_VALUES)
        check_promises(outputs, self.promised, self.owner)
        hand_out(outputs, self.outgoing, self.state.values, self.state.device.token)


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeForward(Compute):
    """Run a stage; in training, keep the state for the backward.

    `differentiable` names the outputs that will get gradients, `losses` those at which the backward starts; `saved` is
    None in inference.
    """

    forward: StageForward
    promised: list[Promise]
    saved: Saved | None
    differentiable: tuple[str, ...]
    losses: tuple[str, ...]

    def run(self) -> None:
        saved = self.saved
        outputs = self.forward(self._inputs(saved), self.micro_batch)
        check_promises(outputs, self.promised, self.owner)
        hand_out(outputs, self.outgoing, self.state.values, self.state.device.token)
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
                    inputs[slot.name] = as_result(leaf)
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
                saved.losses.append((get_gradient_edge(loss), seed))

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
        roots += [root for root, _ in saved.losses]
        seeds += [seed for _, seed in saved.losses]
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


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeBackward(ComputeGradients):
    """A full backward, to the inputs and the parameters."""

    def run(self) -> None:
        roots, seeds = self._roots()
        if roots:
            torch.autograd.backward(roots, seeds, retain_graph=self.state.keeps_graphs)
        _hand_out_gradients(self.saved.leaves, self.outgoing, self.state)
        self.saved.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class ComputeInput(ComputeGradients):
    """A backward to the inputs; parameters only get gradients that fall out on the way."""

    split: SplitBackward

    def run(self) -> None:
        roots, seeds = self._roots()
        self.split.input_gradients(roots, seeds, self.saved.leaves)
        _hand_out_gradients(self.saved.leaves, self.outgoing, self.state)
        self.saved.clear()


def _hand_out_gradients(leaves: Mapping[str, Tensor], outgoing: Iterable[EdgeTensors], state: State) -> None:
    """Cut the gradients of the inputs into messages; a leaf on which nothing depends has gradient zero."""
    gradients = {name: _gradient(leaf) for name, leaf in leaves.items()}
    hand_out(gradients, outgoing, state.values, state.device.token)


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


def with_weights(weights: WeightPolicy, action: Action, state: State, operation: Operation) -> Operation:
    """An operation on the parameter values that the policy chooses."""
    stage, number, final = action.stage, action.micro_batch, action.kind in (Kind.BACKWARD, Kind.INPUT)
    enter, leave = (
        (weights.enter_forward, weights.leave_forward)
        if action.kind is Kind.FORWARD
        else (weights.enter_backward, weights.leave_backward)
    )

    def run() -> None:
        use = Use(stage, state.step, number, final)
        enter(use)
        operation()
        leave(use)

    return run


def drawing(stage: StageModule, streams: RandomStreams, state: State, place: tuple[int, int, int]) -> StageForward:
    """The forward of a stage inside its random stream. `place`: stage, pipeline and first sample."""

    def forward(values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        with streams.use(*place, state.step):
            return stage.forward(values, micro_batch)

    return forward
