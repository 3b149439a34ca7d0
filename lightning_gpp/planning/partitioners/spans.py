"""Spans of a chain of units: seconds and bytes of the units between two positions."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import slowest_seconds
from lightning_gpp.planning.problem.problem import Array, Problem


class Spans:
    """Units in their topological order, for one micro-batch size.

    Tables are indexed by [start, stop]: the units start..stop-1. If start >= stop, seconds are infinite.
    """

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size, self.num_units = problem, size, problem.num_units
        self.recompute = problem.recompute is True
        self._seconds: dict[int, Array] = {}

    def seconds(self, num_samples: int) -> Array:
        """Seconds of a forward and a backward for a share of `num_samples` samples, recomputation included."""
        if num_samples not in self._seconds:
            forward, total = slowest_seconds(self.problem, num_samples)
            table = _sums(total)
            if self.recompute:
                table[:, :-1] += _sums(forward)[:, :-1]
            self._seconds[num_samples] = np.where(self.valid, table, np.inf)
        return self._seconds[num_samples]

    def kept_bytes(self, num_samples: int) -> Array:
        """Bytes of a micro-batch in flight: the tensors that autograd saves, or the inputs with recomputation."""
        saved = _sums(self.problem.saved_bytes(num_samples))
        if self.recompute:
            per_sample, fixed = self._received
            saved[:, :-1] = (per_sample * num_samples + fixed)[:, :-1]
        return saved

    def working_bytes(self, num_samples: int) -> Array:
        """Bytes that a backward recomputes; 0 without recomputation, and for spans with the user's step."""
        saved = _sums(self.problem.saved_bytes(num_samples))
        saved[:, -1] = 0
        return saved if self.recompute else np.zeros_like(saved)

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        positions = np.arange(self.num_units + 1)
        return positions[:, None] < positions[None, :]

    @cached_property
    def static_bytes(self) -> Array:
        return _sums(self.problem.static_bytes)

    @cached_property
    def parameter_bytes(self) -> Array:
        return _sums(self.problem.parameter_bytes)

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes per micro-batch that cross each position, values forward and gradients backward."""
        crossing = np.zeros(self.num_units + 1)
        for value in self.problem.units.values:
            crossing[value.src + 1 : max(value.dsts) + 1] += value.num_directions * value.bytes.at(self.size)
        return crossing

    @cached_property
    def rigid(self) -> NDArray[np.bool_]:
        """Mask of spans without replicas, because data or values that enter or leave cannot be cut into shares."""
        units, values = self.problem.units.units, self.problem.units.values
        rigid = _sums(np.array([not unit.divisible for unit in units], dtype=float)) > 0
        for value in values:
            if not value.sliceable:
                makes = self._holding([value.src])
                reads = self._holding(value.dsts)
                alone = makes & self._within(value.src, max(value.dsts))
                rigid |= (makes | reads) & ~alone
        return rigid

    @cached_property
    def _received(self) -> tuple[Array, Array]:
        """Bytes that enter each span, per sample and fixed."""
        sums = np.zeros((2, self.num_units + 1, self.num_units + 1))
        for value in self.problem.units.values:
            enters = self._holding(value.dsts) & ~self._holding([value.src])
            sums[0] += enters * value.bytes.per_sample
            sums[1] += enters * value.bytes.fixed
        return sums[0], sums[1]

    def _holding(self, units: list[int] | tuple[int, ...]) -> NDArray[np.bool_]:
        """Mask of the spans with at least one of these units."""
        count = np.zeros(self.num_units)
        count[list(units)] = 1
        return self.valid & (_sums(count) > 0)

    def _within(self, first: int, last: int) -> NDArray[np.bool_]:
        positions = np.arange(self.num_units + 1)
        return (positions[:, None] <= first) & (positions[None, :] > last)


def _sums(values: Array) -> Array:
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums: Array = prefix[None, :] - prefix[:, None]
    return sums
