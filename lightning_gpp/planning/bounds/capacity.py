"""Lower bound from the capacity of stages: units are never divided.

Within T seconds a stage of r replicas can run units of at most N_r(T) seconds (their seconds on one device): a knapsack
in which a unit takes M t_u(b / r) seconds, and 2 (r - 1) p_u / (r bandwidth_r) for reducing its gradients. So units
that are large for a device leave part of it idle, small shares cost more, and replicas reduce gradients. No device does
more than R(T) = max N_r(T) / r, so a step of T seconds needs W <= K R(T).

The smallest T of a grid for which this holds bounds the step from below.

Lower bound from a bottleneck unit: an ancestor or descendant of every other unit.

Every micro-batch passes through its stage, which waits for the other stages, and they wait for it.

Let j be the bottleneck unit and z its stage, on r of the K devices. No other stage has units both ahead of j and behind
it, as that would make a cycle with z. Of the other K - r devices, k run stages behind z and the rest run stages ahead
of it. With M micro-batches, z is busy for L = M tau_z seconds, and each stage ahead for at most Y = M max tau_s. Can a
step take only T seconds?

* **z** waits for the slowest stage ahead, before its first forward and after its last backward: L + Y / M <= T. So it
  has capacity for min(C_r(L), N_r(T - head)), where C is like N, but without all-reduces, and head is
  the least part of Y / M that is that stage's forward.
* **A stage s ahead** waits for z: between its last forward and its last backward it runs at most M - 1 backwards, and
  between its first forward and its first backward at most M - 1 forwards, and in both a micro-batch goes through z. So
  it idles for at least c = tau_z - (M - 1) x for x >= min(f_s, g_s), where x <= Y / 2M. Stages ahead hold at most
  min(R(T - c), C(Y)) per device. (Fewer micro-batches in flight, as in 1F1B, do not make them wait for longer: their
  slack is free.)
* **A stage behind** waits for z and for the slowest stage ahead, before its first forward and after its last backward.
  So it holds at most min(C(T - (L + Y) / M), R(T - head)) per device, where head is the forwards' part of (L + Y) / M.

Units behind j are in z or in a stage behind it, units ahead are in z or in a stage ahead; N, R and C are computed from
these units alone. If T is feasible, all work fits for some r, k, L and Y: z takes the units behind j, and those
ahead of it, that do not fit into the stages on their side. Capacities grow with T, so the smallest feasible T bounds
the step from below. L and Y are treated in intervals, each at its better end. The bound is computed for the longest
of the bottleneck units with few units behind them, and for the last one. It requires gradients to return along all
edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array, Problem

CELLS = 2048
"""Cells of the grid of seconds, which ends at twice the step time of perfect balance."""

MAX_ITEMS = 160
"""If there are more units, they are packed as if they could be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A stage of `fewest` to `most` replicas: the least seconds of all units on each of them.

    `busy`: of a micro-batch; `summing`: of reducing the gradients.
    """

    fewest: int
    most: int
    busy: Array
    summing: Array


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
    shares = [replace(share, busy=share.busy[chosen], summing=share.summing[chosen]) for share in capacities.shares]
    return _filled(num_micro_batches, shares, capacities.work[chosen], capacities.cell)


def _filled(num_micro_batches: float, shares: Sequence[Share], work: Array, cell: float) -> Capacities:
    grid: Array = cell * np.arange(CELLS + 1, dtype=float)
    computing = [num_micro_batches * share.busy for share in shares]
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


# -- bottlenecks ------------------------------------------------------------------------------------------------------

STRIDE = 64
"""Cells of the grid per interval of L and Y."""

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
    seconds = work.tolist()
    few = [unit for unit in units[:-1] if _work(seconds, behind[unit]) <= limit]
    return [*sorted(few, key=lambda unit: -float(work[unit]))[:1], last]


def _reached(units: Iterable[int], step: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """The units that can be reached from each unit, as bits. In `units`, the next ones of a unit come before it."""
    reached: dict[int, int] = {}
    for unit in units:
        reached[unit] = 0
        for other in step(unit):
            reached[unit] |= reached[other] | 1 << other
    return reached


def _work(seconds: Sequence[float], units: int) -> float:
    return sum(each for unit, each in enumerate(seconds) if units >> unit & 1)


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
        self.devices = problem.num_devices
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
        ahead, behind = self._ahead(spans), self._behind(spans)
        return any(
            self._packs(inside, (others - following) * ahead, following * behind)
            for following in self._numbers_behind(cells, others, most)
        )

    def _own(self, number: int) -> float:
        """Least seconds for which z is busy: those of its bottleneck unit."""
        return self.micro_batches * float(self.capacities.shares[number].busy[self.unit])

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

    def _waiting(self, spans: _BusySpans) -> BottleneckSeconds:
        """Seconds c, see the module."""
        through, most = spans.busy[0] / self.number, spans.slowest[1] / self.number
        shorter = np.minimum(self.split.share * most + self.split.extra, most / 2)
        waiting: BottleneckSeconds = np.maximum(0.0, through - (self.number - 1) * shorter)
        return waiting

    def _ahead(self, spans: _BusySpans) -> Array:
        """Capacity per device ahead of z."""
        computing = self.ahead.at(self.ahead.computing_density, spans.slowest[1])
        return np.minimum(computing, self.ahead.at(self.ahead.density, spans.seconds - self._waiting(spans)))

    def _behind(self, spans: _BusySpans) -> Array:
        """Capacity per device behind z."""
        waiting = (spans.busy[0] + spans.slowest[0]) / self.number
        return np.minimum(
            self.behind.at(self.behind.computing_density, spans.seconds - waiting),
            self.behind.at(self.behind.density, spans.seconds - self.split.head * waiting),
        )
