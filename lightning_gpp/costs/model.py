"""The interface of cost models: seconds of operators that are computed, measured or read from a file."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lightning_gpp.cluster import Device
from lightning_gpp.graph import Operator


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
