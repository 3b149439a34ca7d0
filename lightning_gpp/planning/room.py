"""A lower bound from what stages have room for: units are never divided, and one stage runs the user's step.

Within T seconds a stage of r replicas holds units of at most N_r(T) device-seconds (counted as on one device): a
knapsack of M t_u(b / r) seconds and the sum of gradients, 2 (r - 1) p_u / (r bandwidth_r), per unit. So units that are
large for a device leave a part of it idle, small shares cost more, and replicas sum gradients. By R(T) = max N_r(T) / r
no device holds more.

Let z be the stage of the step, on r devices. Where a unit of it leads to the step, so do all on the way: z holds all
that follows. Take the units j_1, ..., j_k with which every other unit is in order, and let j_i be the first in z.

* Then z holds all units behind j_i, and none up to j_{i-1}; so it waits for the path to that one, on the K - r devices
  of the others.
* All other devices wait between their last forward and their last backward for the path from j_i to the step and back,
  P_i(b / r), with no more than M - 1 backwards of e T / M seconds to do meanwhile (as in `bound`).

With W_i the units behind j_{i-1}, a step of T seconds needs, for some r and i,

    W - min(N_r(T - wait of z), W_i)  <=  (K - r) R(T - max(0, P_i(b / r) - (M - 1) e T / M))

The smallest T of a grid for which this holds bounds the step from below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem import Array, Problem

CELLS = 2048
"""Of the grid of seconds, which ends at twice the time of perfect balance."""

MAX_ITEMS = 160
"""More units are packed as if they could be divided."""

MAX_JOINTS = 12
"""Units with which all others are in order: the first ones, and the last one, are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A stage of `fewest` to some more replicas: seconds of all units per micro-batch, at the least.

    `summing`: per device, the seconds of summing a unit's gradients.
    """

    fewest: int
    forward: Array
    backward: Array
    summing: Array

    @property
    def total(self) -> Array:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The first unit of the step's stage with which all others are in order.

    Args:
        behind: its longest path to the step, itself included.
        before: the longest path to the joint before it, that one included; empty for the first joint.
        allowed: units that the step's stage may hold.
    """

    behind: list[int]
    before: list[int]
    allowed: list[int]


def least_with_room(problem: Problem, size: int, shares: Sequence[Share], alone: Array, backward_share: float) -> float:
    """Seconds of a step that no plan with micro-batches of `size` samples can beat.

    Args:
        problem: whose last unit runs the step.
        size: samples of a micro-batch.
        shares: of all numbers of replicas.
        alone: seconds of all units per micro-batch on one device.
        backward_share: the most that a unit's backward takes of its seconds.
    """
    number, devices = problem.batch_size / size, problem.num_devices
    work = number * alone
    grid = 2 * float(work.sum()) / devices * np.arange(1, CELLS + 1) / CELLS
    cell = float(grid[0])
    rooms = [_room(number * share.total + share.summing, work, grid) for share in shares]
    density = np.max([room / share.fewest for room, share in zip(rooms, shares, strict=True)], axis=0)
    backwards = (-(-problem.batch_size // size) - 1) / number * backward_share * grid
    least = _first(work.sum() <= devices * density * (1 + 1e-9), cell)
    joints = joints_of(problem, alone)
    if not joints:
        return least
    found = []
    for share, room in zip(shares, rooms, strict=True):
        fastest = [other for other in shares if other.fewest <= max(1, devices - share.fewest)][-1]
        for joint in joints:
            waiting = np.maximum(0.0, float(share.total[joint.behind].sum()) - backwards)
            before = float(fastest.forward[joint.before].sum())
            inside = np.minimum(_at(room, grid - before, cell), float(work[joint.allowed].sum()))
            outside = (devices - share.fewest) * _at(density, grid - waiting, cell)
            found.append(_first(work.sum() - inside <= outside + 1e-9 * work.sum(), cell))
    return max(least, min(found))


def _first(feasible: NDArray[np.bool_], cell: float) -> float:
    """The lower end of the first cell that is feasible, or the end of the grid."""
    return cell * (int(feasible.argmax()) if feasible.any() else CELLS)


def _at(room: Array, seconds: Array, cell: float) -> Array:
    """The room within so many seconds, which are rounded up to the grid; none for no seconds."""
    places = np.ceil(seconds / cell - 1e-9).astype(int)
    return np.where(places > 0, room[np.clip(places, 1, CELLS) - 1], 0.0)


def _room(seconds: Array, work: Array, grid: Array) -> Array:
    """The most work that fits into the seconds of the grid: whole units where they are few."""
    order = np.argsort(seconds / np.maximum(work, 1e-30))
    filled, done = np.cumsum(seconds[order]), np.cumsum(work[order])
    divisible: Array = np.interp(grid, np.concatenate([[0.0], filled]), np.concatenate([[0.0], done]))
    return divisible if len(work) > MAX_ITEMS else np.minimum(divisible, _packed(seconds, work, grid))


def _packed(seconds: Array, work: Array, grid: Array) -> Array:
    """A knapsack of whole units, whose seconds are rounded down to the grid."""
    best = np.zeros(CELLS + 1)
    for cells, value in zip((seconds / grid[0]).astype(int).tolist(), work.tolist(), strict=True):
        if cells <= CELLS:
            best[cells:] = np.maximum(best[cells:], best[: CELLS + 1 - cells] + value)
    return best[1:]


def joints_of(problem: Problem, seconds: Array) -> list[Joint]:
    """All choices of the first joint in the step's stage; none where the step does not follow all other units."""
    order, last = problem.order, problem.num_units - 1
    ancestors = _reached(range(last + 1), order.predecessors)
    descendants = _reached(range(last, -1, -1), order.successors)
    joints = [unit for unit in range(last + 1) if ancestors[unit].bit_count() + descendants[unit].bit_count() == last]
    if not joints or joints[-1] != last:
        return []
    found, previous = [], -1
    for joint in joints[: MAX_JOINTS - 1] + joints[MAX_JOINTS - 1 :][-1:]:
        behind = _path(joint, order.successors, seconds)
        before = _path(previous, order.predecessors, seconds) if previous >= 0 else []
        allowed = [unit for unit in range(last + 1) if previous < 0 or descendants[previous] >> unit & 1]
        found.append(Joint(behind=behind, before=before, allowed=allowed))
        previous = joint
    return found


def _reached(units: Iterable[int], step: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """For every unit all that can be reached from it, as bits; `units` so that the next ones come first."""
    reached: dict[int, int] = {}
    for unit in units:
        reached[unit] = 0
        for other in step(unit):
            reached[unit] |= reached[other] | 1 << other
    return reached


def _path(unit: int, step: Callable[[int], Iterable[int]], seconds: Array) -> list[int]:
    """The longest path from a unit, itself included."""
    longest: dict[int, tuple[float, list[int]]] = {}
    waiting = [unit]
    while waiting:
        here = waiting[-1]
        following = list(step(here))
        missing = [other for other in following if other not in longest]
        if missing:
            waiting.extend(missing)
            continue
        waiting.pop()
        length, path = max((longest[other] for other in following), key=lambda entry: entry[0], default=(0.0, []))
        longest[here] = length + float(seconds[here]), [here, *path]
    return longest[unit][1]
