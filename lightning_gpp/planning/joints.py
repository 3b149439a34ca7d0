"""A lower bound from a joint, a unit that all others are in order with: its stage waits for others, and they for it.

Let j be the joint, z its stage, on r devices. No stage has units both ahead of j and behind it, as that would make a
cycle with z. Of the others' K - r devices, k run stages behind; the rest run stages ahead. With M micro-batches, z is
busy for L = M tau_z seconds, and no stage ahead for longer than Y = M max tau_s. Stages are to last T seconds.

* **z** waits for the slowest stage ahead, before its first forward and after its last backward: L + Y / M <= T. So it
  has room for min(C_r(L), N_r(T - head)), where C is like N (see `room`), but without the sums of gradients, and head
  is what that stage's forward takes of Y / M at the least.
* **A stage s ahead** waits for z. In 1F1B it has w micro-batches in flight, the lesser of M and n + 1 + a, where n is
  the number of stages on its longest path, and a = 1 where the user's step gets a stage of its own. That path goes
  through z: from where it leads around z, it could be led through z. Let P be the seconds of the path there and back,
  P = tau_z + sum tau_i over the n - 1 others. Between its first forward and its first backward s runs w - 1 forwards;
  between its last ones, w - 1 backwards. Of the lesser of both it idles max(A, B) >= P - (w - 1) x, where
  x >= min(f_s, g_s); and if w < M, the two waits are apart: A + B >= 2 P - (w - 1) tau_s.

  For now let no tau_i be below Y / 2M. Then, as x <= Y / 2M, s idles at least

      c = max( tau_z - (1 + a) x,                                               (w - 1 <= n + a)
               min( 2 tau_z - (1 + a) Y / M,                                     (w < M)
                    tau_z + max(0, M - 2 - a) Y / 2M - (M - 1) x ) )             (M - 1 <= n + a)

  With other schedules than 1F1B it is tau_z - (M - 1) x. So stages ahead have room for min(R(T - c), C(Y)) per device,
  and those behind for k R(T), and for no more than there is behind.
* **Small stages** on the path make the wait shorter, by xi_i = max(0, Y / M - 2 tau_i) each, but they have room for
  (Y - M xi_i) / 2 seconds only. With one such device the others ahead idle c - xi; with two or more, these have room
  for Y / 2 seconds each, and no other is said to wait.

If T is feasible, all work has room for some r, k, L, Y, and xi. Room only grows with T, so the smallest feasible T
bounds the step from below; L, Y and xi are looked at in intervals, each at its better end. This is done for the joints
with few units behind that take longest, and for the last one. Gradients have to return along all edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem import Array, Problem
from lightning_gpp.planning.room import CELLS, Rooms, without

STRIDE = 64
"""Cells of the grid per interval of L and Y."""

SMALL = 6
"""Intervals of xi."""

MAX_BEHIND = 3.0
"""Joints with more devices' worth of work behind are not looked at."""

Seconds: TypeAlias = NDArray[np.floating[Any]]
Interval: TypeAlias = tuple[Seconds, Seconds]
"""Lower and upper ends of seconds, by intervals of L (rows) and of Y (columns)."""

NUM_JOINTS = 2
"""So many, besides the last unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How forwards and backwards divide a unit's seconds, at the most and at the least.

    Args:
        share: with `extra`: a stage's shorter pass takes at most `share` of its seconds, and `extra` more.
        extra: seconds.
        head: of a stage's seconds, at least this fraction is its forward.
    """

    share: float
    extra: float
    head: float


def least_with_joint(problem: Problem, size: int, rooms: Rooms, split: Split, joint: int, least: float) -> float:
    """Seconds of a step that no plan with micro-batches of `size` samples can beat.

    Args:
        problem: whose last unit runs the step.
        size: samples of a micro-batch.
        rooms: of this size.
        split: of forwards and backwards.
        joint: one of `joints_of`.
        least: what is known already.
    """
    wait = _Joint(problem, size, rooms, split, joint)
    return max(least, rooms.cell * _infeasible(wait.feasible, int(least / rooms.cell), CELLS))


def _infeasible(feasible: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number of cells from `low` to `high` that is not feasible; `low` if all are."""
    if low >= high or feasible(low + 1):
        return low
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low


def joints_of(problem: Problem, work: Array) -> list[int]:
    """The joints that are looked at, the most promising first.

    None where the step does not follow all other units, or where the gradient of a value does not return.
    """
    if not all(value.num_directions == 2 and value.bytes.at(1) > 0 for value in problem.units.values):
        return []
    order, last = problem.order, problem.num_units - 1
    ahead = _reached(range(last + 1), order.predecessors)
    behind = _reached(range(last, -1, -1), order.successors)
    joints = [unit for unit in range(last + 1) if ahead[unit].bit_count() + behind[unit].bit_count() == last]
    if not joints or joints[-1] != last:
        return []
    limit = MAX_BEHIND * float(work.sum()) / problem.num_devices
    few = [unit for unit in joints[:-1] if _work(work, behind[unit]) <= limit]
    return [*sorted(few, key=lambda unit: -float(work[unit]))[:NUM_JOINTS], last]


def _reached(units: Iterable[int], step: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """For every unit all that can be reached from it, as bits; `units` so that the next ones come first."""
    reached: dict[int, int] = {}
    for unit in units:
        reached[unit] = 0
        for other in step(unit):
            reached[unit] |= reached[other] | 1 << other
    return reached


def _work(work: Array, units: int) -> float:
    return sum(float(seconds) for unit, seconds in enumerate(work) if units >> unit & 1)


class _Joint:
    """Which steps are feasible, as far as one joint tells."""

    def __init__(self, problem: Problem, size: int, rooms: Rooms, split: Split, unit: int) -> None:
        self.number, self.micro_batches = -(-problem.batch_size // size), problem.batch_size / size
        self.rooms, self.split, self.unit = without(rooms, unit, self.micro_batches), split, unit
        self.devices, self.single_step = problem.num_devices, problem.single_step
        self.one_f_one_b = set(problem.schedules) <= {"1f1b"}
        self.wanted = float(self.rooms.work.sum()) * (1 - 1e-9)
        self.density, self.computing = self.rooms.density, self.rooms.computing_density
        self.behind = _work(rooms.work, _reached(range(problem.num_units - 1, -1, -1), problem.order.successors)[unit])

    def feasible(self, cells: int) -> bool:
        """Whether all work may have room within so many cells of the grid."""
        if self.devices * self.density[cells] < self.wanted:
            return False
        return any(self._fits(cells, number) for number in range(len(self.rooms.shares)))

    def _fits(self, cells: int, number: int) -> bool:
        """The same where z has one of the numbers of replicas."""
        share, own, seconds = self.rooms.shares[number], self._own(number), cells * self.rooms.cell
        left = seconds - own - float(share.summing[self.unit])
        full = float(self.rooms.at(self.rooms.full[number], left))
        others, density = self.devices - share.fewest, float(self.density[cells])
        if left < 0 or full + others * density < self.wanted:
            return False
        if share.most >= self.devices and full >= self.wanted:
            return True
        levels = np.arange(0, cells + STRIDE, STRIDE) * self.rooms.cell
        busy, slowest = (np.maximum(levels[:-1, None], own), levels[1:, None]), (levels[None, :-1], levels[None, 1:])
        missing = self.wanted - self._inside(cells, number, busy, slowest)
        most_behind = min(others, max(2, ceil(self.behind / density))) if self.behind else 0
        return bool(np.any(self._with_small(cells, others, slowest) >= missing)) or any(
            np.any(self._outside(cells, others, behind, slowest, wait) >= missing)
            for behind in range(most_behind + 1)
            for wait in [self._waiting(busy[0], slowest, behind, share.fewest)]
        )

    def _own(self, number: int) -> float:
        """Seconds that z is busy for at least: those of the joint."""
        return self.micro_batches * float(self.rooms.shares[number].total[self.unit])

    def _inside(self, cells: int, number: int, busy: Interval, slowest: Interval) -> Array:
        """Work besides the joint that z has room for; minus infinity where it cannot be busy for so long."""
        seconds, own = cells * self.rooms.cell, self._own(number)
        latest = np.minimum(busy[1], seconds - slowest[0] / self.number)
        left = (
            seconds - self.split.head * slowest[0] / self.number - float(self.rooms.shares[number].summing[self.unit])
        )
        room = np.minimum(
            self.rooms.at(self.rooms.computing[number], latest - own),
            self.rooms.at(self.rooms.full[number], left - own),
        )
        return np.where((latest < busy[0] * (1 - 1e-9)) | (left < own * (1 - 1e-9)), -inf, room)

    def _waiting(self, busy: Seconds, slowest: Interval, behind: int, replicas: int) -> Seconds:
        """Seconds c."""
        number, (low, high) = self.number, slowest
        through, most = busy / number, high / number
        shorter = np.minimum(self.split.share * most + self.split.extra, most / 2)
        if not self.one_f_one_b:
            return np.asarray(np.maximum(0.0, through - (number - 1) * shorter))
        apart = self.single_step and behind != 1 and (behind > 0 or replicas > 1)
        many = 2 * through - (1 + apart) * most
        few = through + max(0, number - 2 - apart) * low / (2 * number) - (number - 1) * shorter
        waiting: Seconds = np.maximum(0.0, np.maximum(through - (1 + apart) * shorter, np.minimum(many, few)))
        return waiting

    def _with_small(self, cells: int, others: int, slowest: Interval) -> Array:
        """Work that all other stages have room for if two devices or more run small ones."""
        density = float(self.density[cells])
        small = np.minimum(density, self.rooms.at(self.computing, slowest[1] / 2))
        room: Array = 2 * small + (others - 2) * density
        return room if self.one_f_one_b and others > 1 else np.full_like(room, -inf)

    def _outside(self, cells: int, others: int, behind: int, slowest: Interval, waiting: Seconds) -> Array:
        """Work that all other stages have room for, `behind` devices of which are behind z."""
        density, seconds = float(self.density[cells]), cells * self.rooms.cell
        ahead, following = others - behind, min(self.behind, behind * density)
        limit = np.minimum(density, self.rooms.at(self.computing, slowest[1]))
        room: Array = ahead * np.minimum(limit, self.rooms.at(self.density, seconds - waiting)) + following
        if not self.one_f_one_b:
            return room
        for low, high in pairwise(np.linspace(0.0, 1.0, SMALL + 1)):
            small = self.rooms.at(self.rooms.computing[0], slowest[1] * (1 - low) / 2)
            late = seconds - np.maximum(0.0, waiting - high * slowest[1] / self.number)
            dense = np.minimum(limit, self.rooms.at(self.density, late))
            if ahead:
                room = np.maximum(room, small + (ahead - 1) * dense + following)
            if behind:
                room = np.maximum(room, np.minimum(self.behind, small + (behind - 1) * density) + ahead * dense)
        return room
