"""Cost models: their interface, the roofline model, and the footprint of parameters.

Roofline model: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52(4),
2009. An operator takes as long as its arithmetic or the movement of its tensors, whichever is longer, plus the cost of
calling it. Small micro-batches are inefficient because of the constant cost of a call, and because parameters are read
once per micro-batch, however small it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, NamedTuple, Protocol

from lightning_gpp.cluster import Device
from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import Operator, OperatorGraph


class Seconds(NamedTuple):
    """Seconds of one operator for one micro-batch."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient


class CostModel(Protocol):
    """A source of costs for the operators of one graph."""

    @property
    def name(self) -> str:
        """The origin of the figures, for reports."""
        ...

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """Seconds of an operator on a device for a micro-batch of `num_samples` samples (at least 1)."""
        ...


def rerun_seconds(costs: CostModel, operators: Iterable[Operator], num_samples: int, device: Device) -> float:
    """Seconds that a backward takes more if a module with these operators runs again inside of it: its forward."""
    return sum(costs.seconds(operator, num_samples, device).forward for operator in operators)


OPTIMIZER_STATES: Final = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Number of tensors of its size that an optimizer of torch.optim keeps for each parameter."""

PRECISIONS: Final = {"64-true": 0.0, "32-true": 0.0, "bf16-true": 0.0, "16-true": 0.0, "bf16-mixed": 0.5}
"""Bytes that autocast adds per byte of a float32 parameter (a cached copy of half the size), by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a device keeps per byte of parameters.

    Args:
        optimizer: a key of OPTIMIZER_STATES.
        precision: a key of PRECISIONS. With "...-true", the parameters themselves have that precision.
        training: whether there are gradients and an optimizer.

    Raises:
        ConfigError: the optimizer or precision is unknown.
    """

    optimizer: str = "adam"
    precision: str = "32-true"
    training: bool = True

    def __post_init__(self) -> None:
        optimizer = "optimizer", self.optimizer, [*OPTIMIZER_STATES]
        for key, value, allowed in (optimizer, ("trainer.precision", self.precision, [*PRECISIONS])):
            if value not in allowed:
                close = get_close_matches(str(value), allowed, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(allowed)}.{hint}")

    @property
    def copies(self) -> float:
        """Copies per byte: weights, gradients, the optimizer's state, and autocast's copy."""
        gradients_and_state = 1 + OPTIMIZER_STATES[self.optimizer] if self.training else 0
        return 1 + gradients_and_state + PRECISIONS[self.precision]


def held_copies(copies: float, sharding: str, num_ranks: int) -> float:
    """Bytes that each of the ranks with the same stage holds permanently per byte of its parameters.

    Args:
        copies: what one rank alone holds.
        sharding: `zero1` splits the optimizer's state, `fsdp` everything.
        num_ranks: number of ranks.
    """
    split = {"none": 0.0, "zero1": max(0.0, copies - 2), "fsdp": copies}[sharding]
    return copies - split + split / num_ranks


@dataclass(frozen=True, slots=True)
class ForwardOnly:
    """The costs of a model without those of backwards, for inference."""

    costs: CostModel

    @property
    def name(self) -> str:
        """The origin of the figures."""
        return self.costs.name

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """See `CostModel`."""
        return Seconds(self.costs.seconds(operator, num_samples, device).forward)


ACCUMULATION_PASSES: Final = 3
"""Passes over memory to accumulate a weight gradient: two reads, one write."""


class Roofline:
    """A cost model of the operators of a graph.

    The backward of an operator with parameters has one product for the gradient of its input, if that is needed, and
    one for that of its weights. The backward of other operators costs two forwards: one for each factor of a product.
    """

    name = "roofline"

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self._wanted = {operator.name: self._input_gradient_wanted(operator) for operator in graph}
        kinds: dict[Hashable, int] = {}
        self._kinds = {operator.name: kinds.setdefault(self._kind(operator), len(kinds)) for operator in graph}
        self._known: dict[Device, dict[tuple[int, int], Seconds]] = {}

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """See `CostModel`; values that come from the data cost nothing."""
        known = self._known.setdefault(device, {})
        key = self.kind(operator), num_samples
        if key not in known:
            known[key] = self._seconds(operator, num_samples, device)
        return known[key]

    def kind(self, operator: Operator) -> int:
        """A number that is equal for operators of equal cost."""
        return self._kinds[operator.name]

    def _kind(self, operator: Operator) -> Hashable:
        """A key that is equal for operators of equal cost: models repeat their blocks."""
        edges = self.graph.nx.in_edges(operator.name, data="outputs")
        read = tuple(self.graph[source].outputs[output] for source, _, outputs in edges for output in outputs)
        sizes = tuple(self.graph.parameter_bytes[name] for name in operator.parameters)
        return operator.target in ("input", "step") and operator.target, operator.flops, operator.outputs, read, sizes

    def _seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        if operator.target == "input":
            return Seconds(0.0)
        moving = self._moved(operator, num_samples) / device.bytes_per_second
        arithmetic = operator.flops.at(num_samples) / device.flops_per_second(_dtype(operator))
        forward = device.seconds_per_operator + max(arithmetic, moving)
        if not has_backward(operator):
            return Seconds(forward)
        if not operator.parameters:
            return Seconds(forward, 2 * forward)
        accumulation = ACCUMULATION_PASSES * self._parameter_bytes(operator) / device.bytes_per_second
        return Seconds(forward, forward if self._wanted[operator.name] else 0.0, forward + accumulation)

    def _input_gradient_wanted(self, operator: Operator) -> bool:
        edges = self.graph.nx.in_edges(operator.name, data="outputs")
        return any(
            self.graph[source].outputs[output].requires_grad for source, _, outputs in edges for output in outputs
        )

    def _moved(self, operator: Operator, num_samples: int) -> float:
        read = sum(
            self.graph[source].outputs[output].bytes(num_samples)
            for source, _, outputs in self.graph.nx.in_edges(operator.name, data="outputs")
            for output in outputs
        )
        written = sum(spec.bytes(num_samples) for spec in operator.outputs)
        return float(read + written) + min(self._parameter_bytes(operator), self._gathered(operator, num_samples))

    def _gathered(self, operator: Operator, num_samples: int) -> float:
        """Bytes of parameters that an operator reads; look-ups (without arithmetic) read only as many as they write."""
        if operator.flops.at(num_samples):
            return float("inf")
        return float(sum(spec.bytes(num_samples) for spec in operator.outputs))

    def _parameter_bytes(self, operator: Operator) -> float:
        return float(sum(self.graph.parameter_bytes[name] for name in operator.parameters))


def _dtype(operator: Operator) -> str:
    return operator.outputs[0].dtype if operator.outputs else "float32"


def has_backward(operator: Operator) -> bool:
    """True if autograd visits the operator: an output requires a gradient, or it is the user's step."""
    return operator.target == "step" or any(spec.requires_grad or spec.local_loss for spec in operator.outputs)
