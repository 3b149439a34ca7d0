"""Seconds of operators that were measured elsewhere, by operator name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpp.graph import Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSeconds:
    """Seconds of one operator, affine in the samples of the micro-batch: its forward, and both halves of its backward.

    `input_gradient` and `weight_gradient` are 0 where there is no such gradient.
    """

    forward: Affine = Affine()
    input_gradient: Affine = Affine()
    weight_gradient: Affine = Affine()

    @property
    def backward(self) -> Affine:
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of every operator of a graph. `name` says where they come from."""

    name: str
    operators: Mapping[str, OperatorSeconds]
