"""A lower bound from what stages have room for: units are never divided.

Within T seconds a stage of r replicas holds units of at most N_r(T) device-seconds (counted as on one device): a
knapsack of M t_u(b / r) seconds and the sum of gradients, 2 (r - 1) p_u / (r bandwidth_r), per unit. So units that are
large for a device leave a part of it idle, small shares cost more, and replicas sum gradients. By R(T) = max N_r(T) / r
no device holds more, so a step of T seconds needs W <= K R(T).

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
"""Cells of the grid of seconds, which ends at twice the time of perfect balance."""

MAX_ITEMS = 160
"""More units are packed as if they could be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A stage of `fewest` to `most` replicas: seconds of all units per micro-batch, at the least.

    `summing`: per device, the seconds of summing a unit's gradients.
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
class Rooms:
    """The most work that stages hold, by cells of the grid: entry i within i cells of `cell` seconds.

    Args:
        shares: of all numbers of replicas.
        work: seconds of all units in a step, on one device.
        cell: seconds.
        full: by share, where the sums of gradients take their time too.
        computing: by share, where only forwards and backwards count.
    """

    shares: Sequence[Share]
    work: Array
    cell: float
    full: list[Array]
    computing: list[Array]

    @cached_property
    def density(self) -> Array:
        """The most of `full` per device."""
        return self._density(self.full)

    @cached_property
    def computing_density(self) -> Array:
        return self._density(self.computing)

    def _density(self, rooms: list[Array]) -> Array:
        densest: Array = np.max([room / share.fewest for room, share in zip(rooms, self.shares, strict=True)], axis=0)
        return densest

    def at(self, room: Array, seconds: NDArray[np.floating[Any]] | float) -> Array:
        """Within so many seconds, which are rounded up to the grid; none for no seconds."""
        cells = np.ceil(np.asarray(seconds) / self.cell - 1e-9)
        found: Array = room[np.minimum(np.maximum(cells, 0), CELLS).astype(int)]
        return found


def rooms_of(num_micro_batches: float, num_devices: int, shares: Sequence[Share], alone: Array) -> Rooms:
    """Knapsacks of all shares.

    Args:
        num_micro_batches: of a step; a part of one counts as such.
        num_devices: of the cluster.
        shares: of all numbers of replicas.
        alone: seconds of all units per micro-batch on one device.
    """
    work = num_micro_batches * alone
    return _filled(num_micro_batches, shares, work, 2 * float(work.sum()) / num_devices / CELLS)


def only(rooms: Rooms, units: Sequence[int], num_micro_batches: float) -> Rooms:
    """The same for some of the units."""
    chosen = np.array(units, dtype=int)
    shares = [
        replace(share, forward=share.forward[chosen], backward=share.backward[chosen], summing=share.summing[chosen])
        for share in rooms.shares
    ]
    return _filled(num_micro_batches, shares, rooms.work[chosen], rooms.cell)


def _filled(num_micro_batches: float, shares: Sequence[Share], work: Array, cell: float) -> Rooms:
    grid: Array = cell * np.arange(CELLS + 1, dtype=float)
    computing = [num_micro_batches * share.total for share in shares]
    return Rooms(
        shares=shares,
        work=work,
        cell=cell,
        full=[_room(seconds + share.summing, work, grid) for seconds, share in zip(computing, shares, strict=True)],
        computing=[_room(seconds, work, grid) for seconds in computing],
    )


def least_with_room(rooms: Rooms, num_devices: int) -> float:
    """Seconds of a step that no plan can beat."""
    feasible = rooms.work.sum() <= num_devices * rooms.density * (1 + 1e-9)
    return rooms.cell * (max(0, int(feasible.argmax()) - 1) if feasible.any() else CELLS)


def _room(seconds: Array, work: Array, grid: Array) -> Array:
    """The most work that fits into the seconds of the grid: whole units where they are few."""
    order = np.argsort(seconds / np.maximum(work, 1e-30))
    filled, done = np.cumsum(seconds[order]), np.cumsum(work[order])
    divisible: Array = np.interp(grid, np.concatenate([[0.0], filled]), np.concatenate([[0.0], done]))
    return divisible if len(work) > MAX_ITEMS else np.minimum(divisible, _packed(seconds, work, float(grid[1])))


def _packed(seconds: Array, work: Array, cell: float) -> Array:
    """A knapsack of whole units, whose seconds are rounded down to the grid."""
    best = np.zeros(CELLS + 1)
    for cells, value in zip((seconds / cell).astype(int).tolist(), work.tolist(), strict=True):
        if cells <= CELLS:
            best[cells:] = np.maximum(best[cells:], best[: CELLS + 1 - cells] + value)
    return best
