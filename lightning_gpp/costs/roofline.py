"""Seconds of operators by the roofline model, from nothing but the operator graph and three figures of a device.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
An operator takes as long as its arithmetic or as moving its tensors, whichever is longer, plus the cost of calling it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from lightning_gpp.errors import ConfigError
from lightning_gpp.graph import Affine, Operator, OperatorGraph

BACKWARD_RATIO: Final = 2.0
"""Backward over forward: one product for the gradient of the input, one for that of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device sustains in practice: FLOP/s, bytes/s of memory, and seconds that calling an operator costs."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    seconds_per_operator: float

    def __post_init__(self) -> None:
        if self.flops_per_second <= 0 or self.bytes_per_second <= 0 or self.seconds_per_operator < 0:
            raise ConfigError(
                f"Device {self.name!r}: flops_per_second={self.flops_per_second:g} and "
                f"bytes_per_second={self.bytes_per_second:g} must be above 0, "
                f"seconds_per_operator={self.seconds_per_operator:g} must not be below 0."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection of two devices: seconds until a message's first byte arrives, then bytes per second."""

    latency: float = 0
    bytes_per_second: float = inf

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bytes_per_second <= 0:
            raise ConfigError(
                f"Link: latency={self.latency:g} s must not be below 0, "
                f"bytes_per_second={self.bytes_per_second:g} must be above 0."
            )

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bytes_per_second


CPU: Final = Device(name="cpu", flops_per_second=30e9, bytes_per_second=8e9, seconds_per_operator=8e-6)
"""One thread of a server core under PyTorch, float32: about a third of what its vector units could do."""

A100: Final = Device(name="a100", flops_per_second=150e12, bytes_per_second=1.4e12, seconds_per_operator=6e-6)
"""Half of the 312 TFLOP/s (bfloat16, dense) and 70 % of the 2.0 TB/s of the manufacturer's sheet for the SXM 80 GB."""

H100: Final = Device(name="h100", flops_per_second=450e12, bytes_per_second=2.3e12, seconds_per_operator=5e-6)
"""Half of the 989 TFLOP/s (bfloat16, dense) and 70 % of the 3.35 TB/s of the manufacturer's sheet for the SXM."""

DEVICES: Final = {device.name: device for device in (CPU, A100, H100)}

LOOPBACK: Final = Link(latency=150e-6, bytes_per_second=1e9)
"""gloo between processes of one machine."""

NVLINK: Final = Link(latency=15e-6, bytes_per_second=200e9)
"""NCCL between GPUs of one node."""


def link_of(device: Device) -> Link:
    """The link between neighbouring devices of this kind, where nothing more is known."""
    return LOOPBACK if device.name == CPU.name else NVLINK


def operator_seconds(graph: OperatorGraph, operator: Operator, num_samples: int, device: Device) -> float:
    """Forward seconds of one operator for a micro-batch of `num_samples`; 0 for values that come from the data."""
    if operator.target == "input":
        return 0.0
    arithmetic = operator.flops.at(num_samples) / device.flops_per_second
    return device.seconds_per_operator + max(arithmetic, _moved(graph, operator, num_samples) / device.bytes_per_second)


def _moved(graph: OperatorGraph, operator: Operator, num_samples: int) -> float:
    read = sum(
        graph[source].outputs[output].bytes(num_samples)
        for source, _, outputs in graph.nx.in_edges(operator.name, data="outputs")
        for output in outputs
    )
    written = sum(spec.bytes(num_samples) for spec in operator.outputs)
    return float(read + written + sum(graph.parameter_bytes[name] for name in operator.parameters))


def has_backward(operator: Operator) -> bool:
    """Whether autograd visits the operator: it makes something that requires grad, or it is the step itself."""
    return operator.target == "step" or any(spec.requires_grad for spec in operator.outputs)


def through(first: float, last: float, num_samples: int) -> Affine:
    """The affine function that is `first` at 1 sample and `last` at `num_samples` (more than 1).

    The roofline is convex and grows no faster than its argument, so this is never negative, and never below the model
    in between.
    """
    slope = (last - first) / (num_samples - 1)
    return Affine(slope, first - slope)
