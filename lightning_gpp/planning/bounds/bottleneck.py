"""Lower bound from a bottleneck unit: an ancestor or descendant of every other unit.

Every micro-batch passes through its stage, which waits for the other stages, and they wait for it.

Let j be the bottleneck unit and z its stage, on r of the K devices. No other stage has units both ahead of j and behind
it, as that would make a cycle with z. Of the other K - r devices, k run stages behind z and the rest run stages ahead
of it. With M micro-batches, z is busy for L = M tau_z seconds, and each stage ahead for at most Y = M max tau_s. Can a
step take only T seconds?

* **z** waits for the slowest stage ahead, before its first forward and after its last backward: L + Y / M <= T. So it
  has capacity for min(C_r(L), N_r(T - head)), where C is like N (see `knapsack`), but without all-reduces, and head is
  the least part of Y / M that is that stage's forward.
* **A stage s ahead** waits for z. In 1F1B it has w = min(M, n + 1 + a) micro-batches in flight, where n is the number
  of stages on its longest path to the sink, and a = 1 if the user's step gets a stage of its own. That path can be
  taken to go through z. Let P be the seconds of the path there and back, P = tau_z + sum tau_i over the n - 1 others.
  Between its first forward and its first backward s runs w - 1 forwards and idles for A; between its last forward and
  its last backward it runs w - 1 backwards and idles for B. So max(A, B) >= P - (w - 1) x for x >= min(f_s, g_s); and
  if w < M, the two waits do not overlap: A + B >= 2 P - (w - 1) tau_s.

  Assume first that no tau_i is below Y / 2M. Then, as x <= Y / 2M, s idles for at least

      c = max( tau_z - (1 + a) x,                                               (w - 1 <= n + a)
               min( 2 tau_z - (1 + a) Y / M,                                     (w < M)
                    tau_z + max(0, M - 2 - a) Y / 2M - (M - 1) x ) )             (M - 1 <= n + a)

  For other schedules than 1F1B, c = tau_z - (M - 1) x. So stages ahead hold at most min(R(T - c), C(Y)) per device.
* **A stage behind** waits for z and for the slowest stage ahead, before its first forward and after its last backward.
  So it holds at most min(C(T - (L + Y) / M), R(T - head)) per device, where head is the forwards' part of (L + Y) / M.
* **Small stages** on the path shorten the wait by xi_i = max(0, Y / M - 2 tau_i) each, but hold at most (Y - M xi_i) /
  2 seconds. With one such device, the others ahead idle for c - xi; with two or more, these hold Y / 2 seconds each,
  and no waiting of the others is assumed.

Units behind j are in z or in a stage behind it, units ahead are in z or in a stage ahead; N, R and C are computed from
these units alone. If T is feasible, all work fits for some r, k, L, Y, and xi: z takes the units behind j, and those
ahead of it, that do not fit into the stages on their side. Capacities grow with T, so the smallest feasible T bounds
the step from below. L, Y and xi are treated in intervals, each at its better end. The bound is computed for the longest
of the bottleneck units with few units behind them, and for the last one. It requires gradients to return along all
edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.bounds.knapsack import CELLS, Capacities, only
from lightning_gpp.planning.problem.problem import Array, Problem

STRIDE = 64
"""Cells of the grid per interval of L and Y."""

SMALL = 6
"""Intervals of xi."""

MAX_BEHIND = 3.0
"""Bottleneck units with more work behind them than this many devices do are ignored."""

BottleneckSeconds: TypeAlias = NDArray[np.floating[Any]]
Interval: TypeAlias = tuple[BottleneckSeconds, BottleneckSeconds]
"""Lower and upper ends of seconds, by intervals of L (rows) and of Y (columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSplit:
    """The division of a unit's seconds into forward and backward: largest and smallest shares.

    Args:
        share: with `extra`: a stage's shorter pass takes at most `share` of its seconds, and `extra` more.
        extra: see `share`; seconds.
        head: the forward takes at least this fraction of a stage's seconds.
    """

    share: float
    extra: float
    head: float


def bound_by_bottleneck(
    problem: Problem, size: int, capacities: Capacities, split: PassSplit, unit: int, least: float
) -> float:
    """Seconds of a step that no plan with micro-batches of `size` samples can beat.

    Args:
        problem: the question; its last unit runs the user's step.
        size: samples of a micro-batch.
        capacities: for this size.
        split: the division of seconds into forwards and backwards.
        unit: one of `bottleneck_units`.
        least: a lower bound that is known already.
    """
    wait = _Feasibility(problem, size, capacities, split, unit)
    return max(least, capacities.cell * _infeasible(wait.feasible, int(least / capacities.cell), CELLS))


def _infeasible(feasible: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number of cells from `low` to `high` that is not feasible; `low` if all are."""
    if low >= high or feasible(low + 1):
        return low
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low


def bottleneck_units(problem: Problem, work: Array) -> list[int]:
    """The bottleneck units to compute bounds for, the most promising first.

    There is none if the user's step does not follow all other units, or if the gradient of a value does not return.
    """
    if not all(value.num_directions == 2 and value.bytes.at(1) > 0 for value in problem.units.values):
        return []
    order, last = problem.order, problem.num_units - 1
    ahead = _reached(range(last + 1), order.predecessors)
    behind = _reached(range(last, -1, -1), order.successors)
    units = [unit for unit in range(last + 1) if ahead[unit].bit_count() + behind[unit].bit_count() == last]
    if not units or units[-1] != last:
        return []
    limit = MAX_BEHIND * float(work.sum()) / problem.num_devices
    few = [unit for unit in units[:-1] if _work(work, behind[unit]) <= limit]
    return [*sorted(few, key=lambda unit: -float(work[unit]))[:1], last]


def _reached(units: Iterable[int], step: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """The units that can be reached from each unit, as bits. In `units`, the next ones of a unit come before it."""
    reached: dict[int, int] = {}
    for unit in units:
        reached[unit] = 0
        for other in step(unit):
            reached[unit] |= reached[other] | 1 << other
    return reached


def _work(work: Array, units: int) -> float:
    return sum(float(seconds) for unit, seconds in enumerate(work) if units >> unit & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BusySpans:
    """Intervals of L and of Y, for steps of `seconds`, which are `cells` of the grid."""

    cells: int
    seconds: float
    busy: Interval
    slowest: Interval


def _spans(cells: int, cell: float, own: float) -> _BusySpans:
    """The intervals, given that z is busy for at least `own` seconds."""
    levels = np.arange(0, cells + STRIDE, STRIDE) * cell
    busy = np.maximum(levels[:-1, None], own), levels[1:, None]
    return _BusySpans(cells=cells, seconds=cells * cell, busy=busy, slowest=(levels[None, :-1], levels[None, 1:]))


class _Feasibility:
    """Test of step times: one is feasible unless this bottleneck unit rules it out."""

    def __init__(self, problem: Problem, size: int, capacities: Capacities, split: PassSplit, unit: int) -> None:
        self.number, self.micro_batches = -(-problem.batch_size // size), problem.batch_size / size
        self.capacities, self.split, self.unit = capacities, split, unit
        self.devices, self.single_step = problem.num_devices, problem.single_step
        self.one_f_one_b = set(problem.schedules) <= {"1f1b"}
        behind = _reached(range(problem.num_units - 1, -1, -1), problem.order.successors)[unit]
        sides = [other for other in range(problem.num_units) if other != unit]
        self.sides = only(capacities, sides, self.micro_batches)
        ahead = [other for other in sides if not behind >> other & 1]
        self.ahead = only(capacities, ahead, self.micro_batches) if behind else self.sides
        self.behind = only(capacities, [other for other in sides if behind >> other & 1], self.micro_batches)
        self.wanted_behind = float(self.behind.work.sum()) * (1 - 1e-9)
        self.wanted = float(self.sides.work.sum()) * (1 - 1e-9)

    def feasible(self, cells: int) -> bool:
        """True if all work may fit within this number of cells of the grid."""
        if self.devices * self.sides.density[cells] < self.wanted:
            return False
        return any(self._fits(cells, number) for number in range(len(self.capacities.shares)))

    def _fits(self, cells: int, number: int) -> bool:
        """The same if z has one of the numbers of replicas."""
        share, own = self.capacities.shares[number], self._own(number)
        left = cells * self.capacities.cell - own - float(share.summing[self.unit])
        most, others = float(self.sides.at(self.sides.full[number], left)), self.devices - share.fewest
        if left < 0 or most + others * float(self.sides.density[cells]) < self.wanted:
            return False
        if share.most >= self.devices and most >= self.wanted:
            return True
        spans = _spans(cells, self.capacities.cell, own)
        inside = self._inside(spans, number)
        return any(
            self._packs(inside, *outside)
            for behind in self._numbers_behind(cells, others, most)
            for outside in self._outside(spans, others - behind, behind, share.fewest)
        )

    def _own(self, number: int) -> float:
        """Least seconds for which z is busy: those of its bottleneck unit."""
        return self.micro_batches * float(self.capacities.shares[number].total[self.unit])

    def _inside(self, spans: _BusySpans, number: int) -> Array:
        """Capacity of z for work besides the bottleneck unit; minus infinity if it cannot be busy for so long."""
        own, summing = self._own(number), float(self.capacities.shares[number].summing[self.unit])
        waiting = spans.slowest[0] / self.number
        latest = np.minimum(spans.busy[1], spans.seconds - waiting)
        left = spans.seconds - self.split.head * waiting - summing
        capacity = np.minimum(
            self.sides.at(self.sides.computing[number], latest - own),
            self.sides.at(self.sides.full[number], left - own),
        )
        return np.where((latest < spans.busy[0] * (1 - 1e-9)) | (left < own * (1 - 1e-9)), -inf, capacity)

    def _numbers_behind(self, cells: int, others: int, inside: float) -> Iterator[int]:
        """Numbers of devices behind z for which all work may fit if nothing waits."""
        ahead, behind = float(self.ahead.density[cells]), float(self.behind.density[cells])
        for number in range(others + 1):
            if self._packs(inside, (others - number) * ahead, number * behind):
                yield number

    def _packs(self, inside: Array | float, ahead: Array | float, behind: Array | float) -> bool:
        """True if the work behind the bottleneck unit fits, and the rest does too."""
        following = inside + np.minimum(behind, self.wanted_behind)
        return bool(np.any((following >= self.wanted_behind) & (following + ahead >= self.wanted)))

    def _waiting(self, spans: _BusySpans, behind: int, replicas: int) -> BottleneckSeconds:
        """Seconds c, see the module."""
        number, (low, high) = self.number, spans.slowest
        through, most = spans.busy[0] / number, high / number
        shorter = np.minimum(self.split.share * most + self.split.extra, most / 2)
        if not self.one_f_one_b:
            return np.asarray(np.maximum(0.0, through - (number - 1) * shorter))
        apart = self.single_step and behind != 1 and (behind > 0 or replicas > 1)
        many = 2 * through - (1 + apart) * most
        few = through + max(0, number - 2 - apart) * low / (2 * number) - (number - 1) * shorter
        waiting: BottleneckSeconds = np.maximum(0.0, np.maximum(through - (1 + apart) * shorter, np.minimum(many, few)))
        return waiting

    def _outside(self, spans: _BusySpans, ahead: int, behind: int, replicas: int) -> Iterator[tuple[Array, Array]]:
        """Alternatives: capacities of the stages ahead of z and of those behind it, on these numbers of devices."""
        waiting, following = self._waiting(spans, behind, replicas), self._behind(spans)
        yield ahead * self._ahead(spans, waiting), behind * following
        if not self.one_f_one_b:
            return
        for low, high in pairwise(np.linspace(0.0, 1.0, SMALL + 1)):
            short = spans.slowest[1] * (1 - low) / 2
            dense = self._ahead(spans, waiting - high * spans.slowest[1] / self.number)
            if ahead:
                yield self.ahead.at(self.ahead.computing[0], short) + (ahead - 1) * dense, behind * following
            if behind:
                yield ahead * dense, self.behind.at(self.behind.computing[0], short) + (behind - 1) * following
        yield from self._with_two_small(spans, ahead, behind, following)

    def _with_two_small(
        self, spans: _BusySpans, ahead: int, behind: int, following: Array
    ) -> Iterator[tuple[Array, Array]]:
        half, dense = spans.slowest[1] / 2, self._ahead(spans, np.zeros(1))
        small_ahead = np.minimum(dense, self.ahead.at(self.ahead.computing_density, half))
        small_behind = np.minimum(following, self.behind.at(self.behind.computing_density, half))
        for first, second in ((0, 2), (1, 1), (2, 0)):
            if first <= ahead and second <= behind:
                yield (
                    first * small_ahead + (ahead - first) * dense,
                    second * small_behind + (behind - second) * following,
                )

    def _ahead(self, spans: _BusySpans, waiting: BottleneckSeconds) -> Array:
        """Capacity per device ahead of z for stages that wait this long."""
        computing = self.ahead.at(self.ahead.computing_density, spans.slowest[1])
        return np.minimum(computing, self.ahead.at(self.ahead.density, spans.seconds - np.maximum(0.0, waiting)))

    def _behind(self, spans: _BusySpans) -> Array:
        """Capacity per device behind z."""
        waiting = (spans.busy[0] + spans.slowest[0]) / self.number
        return np.minimum(
            self.behind.at(self.behind.computing_density, spans.seconds - waiting),
            self.behind.at(self.behind.density, spans.seconds - self.split.head * waiting),
        )
