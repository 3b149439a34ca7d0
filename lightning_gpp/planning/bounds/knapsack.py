"""Lower bound from the capacity of stages: units are never divided.

Within T seconds a stage of r replicas can run units of at most N_r(T) seconds (their seconds on one device): a knapsack
in which a unit takes M t_u(b / r) seconds, and 2 (r - 1) p_u / (r bandwidth_r) for reducing its gradients. So units
that are large for a device leave part of it idle, small shares cost more, and replicas reduce gradients. No device does
more than R(T) = max N_r(T) / r, so a step of T seconds needs W <= K R(T).

The smallest T of a grid for which this holds bounds the step from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array

CELLS = 2048
"""Cells of the grid of seconds, which ends at twice the step time of perfect balance."""

MAX_ITEMS = 160
"""If there are more units, they are packed as if they could be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A stage of `fewest` to `most` replicas: the least seconds of all units per micro-batch.

    `summing`: seconds of reducing a unit's gradients, per device.
    """

    fewest: int
    most: int
    forward: Array
    backward: Array
    summing: Array

    @property
    def total(self) -> Array:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Capacities:
    """The most work that fits into stages: entry i is for i cells of `cell` seconds.

    Args:
        shares: one per range of numbers of replicas.
        work: seconds of all units in a step, on one device.
        cell: seconds.
        full: by share, with the reductions of gradients.
        computing: by share, with forwards and backwards only.
    """

    shares: Sequence[Share]
    work: Array
    cell: float
    full: list[Array]
    computing: list[Array]

    @cached_property
    def density(self) -> Array:
        """The maximum of `full` per device."""
        return self._density(self.full)

    @cached_property
    def computing_density(self) -> Array:
        return self._density(self.computing)

    def _density(self, capacities: list[Array]) -> Array:
        densest: Array = np.max(
            [entry / share.fewest for entry, share in zip(capacities, self.shares, strict=True)], axis=0
        )
        return densest

    def at(self, capacity: Array, seconds: NDArray[np.floating[Any]] | float) -> Array:
        """The capacity within `seconds`, rounded up to the grid; 0 for 0 seconds."""
        cells = np.ceil(np.asarray(seconds) / self.cell - 1e-9)
        work: Array = capacity[np.minimum(np.maximum(cells, 0), CELLS).astype(int)]
        return work


def capacities_of(num_micro_batches: float, num_devices: int, shares: Sequence[Share], alone: Array) -> Capacities:
    """The capacities of all shares, by solving their knapsacks.

    Args:
        num_micro_batches: of a step; may be fractional.
        num_devices: of the cluster.
        shares: one per range of numbers of replicas.
        alone: seconds of all units per micro-batch on one device.
    """
    work = num_micro_batches * alone
    return _filled(num_micro_batches, shares, work, 2 * float(work.sum()) / num_devices / CELLS)


def only(capacities: Capacities, units: Sequence[int], num_micro_batches: float) -> Capacities:
    """The capacities if there were only these units."""
    chosen = np.array(units, dtype=int)
    shares = [
        replace(share, forward=share.forward[chosen], backward=share.backward[chosen], summing=share.summing[chosen])
        for share in capacities.shares
    ]
    return _filled(num_micro_batches, shares, capacities.work[chosen], capacities.cell)


def _filled(num_micro_batches: float, shares: Sequence[Share], work: Array, cell: float) -> Capacities:
    grid: Array = cell * np.arange(CELLS + 1, dtype=float)
    computing = [num_micro_batches * share.total for share in shares]
    return Capacities(
        shares=shares,
        work=work,
        cell=cell,
        full=[_capacity(seconds + share.summing, work, grid) for seconds, share in zip(computing, shares, strict=True)],
        computing=[_capacity(seconds, work, grid) for seconds in computing],
    )


def bound_by_capacity(capacities: Capacities, num_devices: int) -> float:
    """Seconds of a step that no plan can beat."""
    feasible = capacities.work.sum() <= num_devices * capacities.density * (1 + 1e-9)
    return capacities.cell * (max(0, int(feasible.argmax()) - 1) if feasible.any() else CELLS)


def _capacity(seconds: Array, work: Array, grid: Array) -> Array:
    """The most work that fits into each number of cells; units stay undivided if they are few."""
    order = np.argsort(seconds / np.maximum(work, 1e-30))
    filled, done = np.cumsum(seconds[order]), np.cumsum(work[order])
    divisible: Array = np.interp(grid, np.concatenate([[0.0], filled]), np.concatenate([[0.0], done]))
    return divisible if len(work) > MAX_ITEMS else np.minimum(divisible, _packed(seconds, work, float(grid[1])))


def _packed(seconds: Array, work: Array, cell: float) -> Array:
    """A knapsack of undivided units, whose seconds are rounded down to the grid."""
    best = np.zeros(CELLS + 1)
    for cells, value in zip((seconds / cell).astype(int).tolist(), work.tolist(), strict=True):
        if cells <= CELLS:
            best[cells:] = np.maximum(best[cells:], best[: CELLS + 1 - cells] + value)
    return best
