"""A lower bound from one path of units: the stages along it are found one by one, so that all of them fit into a step.

Take any path of units along whose edges values are sent and gradients return. Stages form no cycle, so the units of a
stage on the path follow each other on it. Other units, and light ones on the path, count nothing. With M micro-batches
of b samples, the last replica of stage s on the path is busy for f_s and g_s seconds with the forward and backward of
one, and all its replicas sum gradients for R_s seconds after the last backward. For each stage, a step of T seconds
contains one after the other:

* **Head** H_s: the forwards of the first micro-batch in all stages ahead.
* **Work**: M (f_s + g_s).
* **Turn**: let D_s be the way of one micro-batch through all later stages and back, which lies between the forward and
  the backward of it. Before its first backward the stage can only run the other M - 1 forwards meanwhile. So it idles
  for at least D_s - (M - 1) f_s, whatever its memory and slack. A forward that runs again may fill that time, but takes
  M times as long in the work.
* **Tail** max(R_s, E_s): the stage sums, and the last gradient returns through the stages ahead, which sum when it has
  passed them. E_s = g_{s-1} + max(R_{s-1}, E_{s-1}), and nothing for the first stage.

All of it grows with H_s and with X_s = H_s + E_s, and so do those of the next stage:

    max(H_s + R_s, X_s) + M (f_s + g_s) + turn_s <= T,   H' = H_s + f_s,   X' = max(H_s + R_s, X_s) + f_s + g_s.

So for each number of units and of devices that run them, only the least H and the least X count, each of any plan. T is
ruled out if the whole path has no place on all devices. D_s is taken with as many replicas as possible in all later
stages. Of the numbers of replicas in a range, the smallest one counts as the number of devices, and the largest one for
the share of a micro-batch. The units ahead of any are on at least as many devices as their work takes in T seconds, and
so are the others; fewer devices than that are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array

STRIDE, PRECISION = 1.1, 1.005
"""Ratios of the times that are tested: of one to the next, and between the last one that was ruled out and the next."""

ROUNDING = 1 + 1e-9
"""Times count as so much longer, because of rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """A stage of at least `fewest` replicas: the least seconds of the path's units on the last one of them.

    `busy`: of all micro-batches; `forward`: of the first; `backward`: of the last, which may be smaller; `way`: of both
    for the last; `summing`: of reducing gradients.
    """

    fewest: int
    busy: Array
    forward: Array
    backward: Array
    way: Array
    summing: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """Stages that end before the same unit: the unit that each begins with, its cells of devices, and seconds.

    `needs`: of work and turn; `both`: of a forward and a backward.
    """

    starts: NDArray[np.int64]
    cells: NDArray[np.int64]
    needs: Array
    forward: Array
    both: Array
    summing: Array


@dataclass(kw_only=True, eq=False)
class PathBound:
    """The search for the least step.

    Args:
        shares: all numbers of replicas.
        number: of micro-batches.
        num_devices: of the cluster.
        cell: devices are counted in multiples of this number, and rounded down for every stage.
        high: seconds that are not ruled out.
        endings: the stages that may fit into a step of the last tests.
    """

    shares: Sequence[PathShare]
    number: int
    num_devices: int
    cell: int
    high: float = inf
    endings: Sequence[_Ending] = ()

    def better(self, least: float) -> float:
        """Seconds of a step that no plan can beat, given a bound that is known already; by one more test."""
        if self.high == inf:
            return self._first(least)
        middle = float(np.sqrt(least * self.high))
        if not self._fits(self.endings, middle):
            return middle
        self.high = middle
        return least

    def complete(self, least: float) -> bool:
        """True if no further test is worth it."""
        return self.high <= least * PRECISION

    def _first(self, least: float) -> float:
        high = least * STRIDE
        self.endings = self._endings(high * ROUNDING**2)
        if not self._fits(self.endings, high):
            return high
        self.high = high
        return least

    def _cells(self, share: PathShare) -> int:
        return share.fewest // self.cell

    def _needed(self, seconds: float) -> NDArray[np.int64]:
        """Cells of devices that the units ahead of each need at least, and all: those that can run each in time."""
        work = [np.where(share.busy <= seconds, self._cells(share) * share.busy, inf) for share in self.shares]
        cells = np.concatenate([[0.0], np.cumsum(np.min(work, axis=0))]) / seconds
        return np.floor(np.minimum(cells, self.num_devices + 1) * (1 - 1e-9)).astype(int)

    @cached_property
    def _ways(self) -> Array:
        """Seconds from each unit to the end of the path and back, and 0."""
        least = np.min([share.way for share in self.shares], axis=0)
        return np.append(np.cumsum(least[::-1])[::-1], 0.0)

    def _endings(self, most: float) -> list[_Ending]:
        """All stages that may fit into `most` seconds, by the unit before which they end."""
        return [self._ending(end, most) for end in range(1, len(self._ways))]

    def _ending(self, end: int, most: float) -> _Ending:
        columns = [self._columns(number, end, most) for number in range(len(self.shares))]
        return _Ending(**{name: np.concatenate([each[name] for each in columns]) for name in columns[0]})

    @cached_property
    def _sums(self) -> list[Array]:
        """Seconds of the units ahead of each, and of all, by share: `busy`, `forward`, `backward`, and `summing`."""
        parts = ([share.busy, share.forward, share.backward, share.summing] for share in self.shares)
        return [np.pad(np.cumsum(part, axis=1), ((0, 0), (1, 0))) for part in parts]

    def _columns(self, number: int, end: int, most: float) -> dict[str, NDArray[np.int64] | Array]:
        """The fields of the stages with one of the shares that end before a unit."""
        sums, cells = self._sums[number], self._cells(self.shares[number])
        first = int(np.searchsorted(sums[0], sums[0, end] - most))
        busy, forward, backward, summing = sums[:, end, None] - sums[:, first:end]
        turn = np.maximum(0.0, self._ways[end] - (self.number - 1) * forward)
        return {
            "starts": np.arange(first, end),
            "cells": np.full(end - first, cells),
            "needs": busy + turn,
            "forward": forward,
            "both": forward + backward,
            "summing": summing,
        }

    def _fits(self, endings: Sequence[_Ending], seconds: float) -> bool:
        """True if a step may take so many seconds.

        Column j of row u stands for the first u units on j cells more than their work needs at least.
        """
        seconds *= ROUNDING
        needed = self._needed(seconds)
        spare = self.num_devices // self.cell - int(needed[-1])
        if spare < 0:
            return False
        spare += 1  # as `needed` is rounded
        head, both = np.full((2, len(needed), spare + 2), inf)  # the last column, or -1: too few devices
        head[0, :-1] = both[0, :-1] = 0.0
        reached = np.arange(len(needed)) == 0
        for end, ending in enumerate(endings, 1):
            kept = np.flatnonzero((ending.needs <= seconds) & reached[ending.starts])
            starts = ending.starts[kept]
            columns = (needed[end] - needed[starts] - ending.cells[kept])[:, None] + np.arange(spare + 1)
            places = starts[:, None], np.clip(columns, -1, spare)
            _extend(ending, kept, seconds, (head[places], both[places]), (head[end, :-1], both[end, :-1]))
            reached[end] = bool((both[end] < inf).any())
        return bool(both[-1, spare - 1] < inf)


def _extend(
    ending: _Ending, kept: NDArray[np.int64], seconds: float, before: tuple[Array, Array], after: tuple[Array, Array]
) -> None:
    """Write the least H' and X' of the kept stages, by cells (columns). `before`: H and X of each stage (rows)."""
    head, both = before
    ahead = np.maximum(head + ending.summing[kept, None], both)
    fits = ahead + ending.needs[kept, None] <= seconds
    after[0][:] = np.where(fits, head + ending.forward[kept, None], inf).min(axis=0, initial=inf)
    after[1][:] = np.where(fits, ahead + ending.both[kept, None], inf).min(axis=0, initial=inf)
