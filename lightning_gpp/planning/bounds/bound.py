"""A lower bound on the step of every plan of a problem, whatever its stages, replicas and schedule.

For one micro-batch size b, with M micro-batches on K devices, let t_u = f_u + g_u be the forward and backward seconds
of unit u for b samples (replicas that share b samples take no less in total), p_u the bytes of its weights. A step
takes T seconds.

* **Work.** r replicas of a unit are busy for M r t_u(b / r) seconds in total. The last of the replicas always has the
  largest share. If all devices are equally fast, the others wait for it, so b / r is rounded up, otherwise down.
* **Waiting.** Of the T seconds the last replica of stage s waits I_s: for the first forwards of the last replicas of
  all stages ahead of its own, as they share the last sample, and after its last backward for theirs. Give every unit
  one path of ancestors, the longest over edges along which gradients come back. A path enters a stage only once, as
  stages form no cycle. So I_s is at least the seconds of all units on the path of any of its units, except those in s
  itself.
* **Sums of gradients.** r > 1 replicas of u reduce its gradients: 2 (r - 1) p_u / bandwidth seconds in total, over the
  links that r devices need. That may overlap with waiting for the last backwards, so a share q of it counts, and 1 - q
  of that waiting, for any q in [0, 1].

So the r_s devices of a stage have time for their work: r_s (T - I_s) >= sum_u in s M r t_u(b / r) =: B_s, and all
devices together are at least K >= sum_s B_s / (T - I_s). For a guess a of I_s / T, by the tangent at a of a convex
function,

    T / (T - I_s) >= h(a) + I_s / (T (1 - a)^2),   h(a) = (1 - 2 a) / (1 - a)^2.

Every unit may have a guess of its own: a_u = x c_u / max c, where c_u is the length of its path and x < 1/2 the guess
for the end of the longest path. Insert I_s, and add up by the units v that are waited for: each of the units D_v whose
path contains v, but not those in the stage of v, waits for it with the weight M t_u / (T (1 - a_u)^2). Those left out,
between which paths stay in the stage of v, have at most r' T seconds of work, r' = min(r, b), so that c_u - c_v <=
r' T / M, and their weights are at most r' / (1 - a')^2 in total, with a' = x (c_v + r' T / M) / max c, at most x. Hence

    K T >= sum_v min_r [ h(a_v) (M r t_v(b / r)  +  2 q (r - 1) p_v / bandwidth_r)
             + (f_v + (1 - q) g_v)(b / r) max(0, sum_{u in D_v} M t_u / (T (1 - a_u)^2)  -  r' / (1 - a')^2) ]

for any q and x, with the price of memory added (`memory`). If devices differ, t_u are seconds on the fastest kind, and
K is how many of these the others are worth: a device that takes w times as long has w times less work in T - I_s
seconds, and so have its sums of gradients. The right side falls with T, so the smallest T that satisfies it bounds the
step from below. In addition, some stage has to run each unit M times, units are never divided, and stages wait for the
stage of a unit that all micro-batches pass (`capacity`), and for each other along a path (`path`). The bound of the
problem is the least of the bounds of its micro-batch sizes.

Not included is that memory limits the micro-batches in flight: a device may have all others to work on while it waits
for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from lightning_gpp.planning.bounds.capacity import (
    Capacities,
    PassSplit,
    Share,
    bottleneck_units,
    bound_by_bottleneck,
    bound_by_capacity,
    capacities_of,
)
from lightning_gpp.planning.bounds.longest_path import path_bound, paths_ahead, returning
from lightning_gpp.planning.bounds.memory import LeastMemory, least_memory
from lightning_gpp.planning.bounds.path import PathBound
from lightning_gpp.planning.bounds.replica_costs import ReplicaRange, fastest, range_costs
from lightning_gpp.planning.problem.problem import Array, Problem, UnitSeconds

SHARES = (0.0, 0.5, 1.0)
"""Values of q that are tried; the best one counts."""

PRICES = (0.0, 0.1, 1.0)
"""Prices of all memory that are tried, as multiples of the device-seconds of a step; the best one counts."""

GUESSES = (0.0, 0.15, 0.3, 0.45)
"""Values of x that are tried; the best one counts."""

BISECTIONS = 14
"""Bisections of the step time, relative to its range."""

MAX_SHARES = 16
"""Largest number of replicas for which the forward's part of a unit's seconds is computed."""


def lower_bound(problem: Problem, seconds: float = inf) -> float:
    """Seconds that the step of no plan can beat.

    Args:
        problem: the question.
        seconds: time limit; a bound whose computation stops early is valid, but looser.
    """
    began, problem = time.perf_counter(), replace(problem, repeats=False)
    bounds = {size: _Bounds(problem, size) for size in _largest_parts(problem)}
    queue = [(_bound_by_balance(problem, size), size) for size in bounds]
    heapify(queue)
    while True:
        least, size = heappop(queue)
        if bounds[size].complete or time.perf_counter() - began >= seconds:
            return least
        heappush(queue, (bounds[size].better(least), size))


def busy_bound(problem: Problem) -> float:
    """Seconds of a step with all devices busy: no schedule beats it, with any number of stages per device."""
    problem = replace(problem, repeats=False)
    return min(_bound_by_balance(problem, size) for size in _largest_parts(problem))


def bound_of_size(problem: Problem, size: int) -> float:
    """The same for plans with micro-batches of `size` samples."""
    problem = replace(problem, repeats=False)
    (size,) = _largest_parts(replace(problem, sizes=(size,)))
    bounds, least = _Bounds(problem, size), _bound_by_balance(problem, size)
    while not bounds.complete:
        least = bounds.better(least)
    return least


def _largest_parts(problem: Problem) -> list[int]:
    """The samples of the largest micro-batch that each size gives, where it does not divide the mini-batch."""
    return sorted({-(-problem.batch_size // -(-problem.batch_size // size)) for size in problem.sizes})


def _bound_by_balance(problem: Problem, size: int) -> float:
    """All devices busy all the time."""
    work = problem.batch_size / size * float(np.sum(fastest(problem, size)))
    return work / _num_fastest(problem, size)


class _Bounds:
    """The bounds of one size, computed one after the other: the size with the least bound is refined first."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size = problem, size
        self.bottlenecks = bottleneck_units(problem, np.add(*fastest(problem, size)))
        self.capacities: Capacities | None = None
        self.path: PathBound | None = None
        self.followed = False

    @property
    def complete(self) -> bool:
        return self.followed and not self.bottlenecks

    def better(self, least: float) -> float:
        """The next bound, or what is known already."""
        if self.capacities is not None and not self.followed:
            self.path = self.path or path_bound(self.problem, self.size)
            least = self.path.better(least) if self.path else least
            self.followed = self.path is None or self.path.complete(least)
            return least
        if self.capacities is not None:
            split = _split(self.problem, self.size)
            return bound_by_bottleneck(self.problem, self.size, self.capacities, split, self.bottlenecks.pop(0), least)
        self.capacities = _capacities(self.problem, self.size)
        others = _bound_by_waiting(self.problem, self.size), _bound_by_largest_unit(self.problem, self.size)
        return max(least, *others, bound_by_capacity(self.capacities, self.problem.num_devices))


def _capacities(problem: Problem, size: int) -> Capacities:
    shares = [
        Share(
            fewest=choice.fewest,
            most=choice.most,
            busy=choice.busy,
            summing=choice.summing / choice.fewest,
        )
        for choice in (range_costs(problem, size, fewest, most) for fewest, most in _replica_ranges(problem, size))
    ]
    forward, backward = fastest(problem, size)
    return capacities_of(problem.batch_size / size, problem.num_devices, shares, forward + backward)


def _split(problem: Problem, size: int) -> PassSplit:
    """The division of seconds for the shares that stages can have; if they are too many, one that holds for any."""
    if min(problem.max_replicas, problem.num_devices) > MAX_SHARES:
        return PassSplit(share=0.5, extra=0.0, head=0.0)
    tables = _tables(problem, size)
    forward, total = np.array([table.forward for table in tables]), np.array([table.total for table in tables])
    part = forward / np.maximum(total, 1e-30)
    weight = float(total.max(axis=0).sum()) / problem.num_devices

    def extra(share: float) -> float:
        return float(np.maximum(0.0, forward - share * total).max(axis=0).sum())

    share = min(sorted(set(part.max(axis=0).tolist())), key=lambda share: share * weight + extra(share))
    return PassSplit(share=share, extra=extra(share), head=float(part.min()))


def _tables(problem: Problem, size: int) -> list[UnitSeconds]:
    """Seconds on all kinds of devices for the shares of up to `MAX_SHARES` replicas, and some smaller shares."""
    counts = {count for pair in _replica_ranges(problem, size) for count in pair}
    samples = {share for count in counts for share in (max(1, size // count), -(-size // count))}
    return [problem.seconds(share, kind) for share in sorted(samples) for kind in range(len(problem.cluster.kinds))]


def _bound_by_waiting(problem: Problem, size: int) -> float:
    choices = _stacked([range_costs(problem, size, fewest, most) for fewest, most in _replica_ranges(problem, size)])
    paths = _Paths(problem, size)
    memory = least_memory(problem, size, choices.fewest[:, 0].astype(int).tolist())
    return _solve(choices, paths, _num_fastest(problem, size), memory)


def _stacked(choices: Sequence[ReplicaRange]) -> ReplicaRange:
    """The ranges as rows."""
    columns = zip(*(astuple(choice) for choice in choices), strict=True)
    fewest, most, *others = (np.array(column, dtype=float) for column in columns)
    return ReplicaRange(fewest[:, None], most[:, None], *others)


MAX_SINGLE, RANGE = 16, 1.15
"""Numbers of replicas up to `MAX_SINGLE` are looked at one by one, larger ones in ranges of this ratio."""


def _replica_ranges(problem: Problem, size: int) -> list[tuple[int, int]]:
    """Numbers of replicas: small ones singly, larger ones in ranges, apart where the largest share gets smaller."""
    most = int(min(problem.max_replicas, problem.num_devices))
    starts = {*range(1, MAX_SINGLE + 1), *(-(-size // share) for share in range(1, MAX_SINGLE))}
    start = MAX_SINGLE
    while (start := int(start * RANGE) + 1) <= most:
        starts.add(start)
    firsts = sorted(start for start in starts if start <= most)
    return list(zip(firsts, [start - 1 for start in firsts[1:]] + [most], strict=True))


def _num_fastest(problem: Problem, size: int) -> float:
    """The most devices of which each is the fastest for every unit that the cluster is worth."""
    slowdowns = _slowdowns(problem, np.add(*fastest(problem, size)), size)
    return sum(1 / slowdowns[problem.cluster.kind(device)] for device in range(problem.num_devices))


def _slowdowns(problem: Problem, total: Array, size: int) -> list[float]:
    """Slowdown of every kind of device relative to the fastest, for the unit where it is smallest."""
    tables = [problem.seconds(size, kind) for kind in range(len(problem.cluster.kinds))]
    return [max(1.0, float(np.min(table.total / np.maximum(total, 1e-30)))) for table in tables]


class _Paths:
    """Every unit's longest path of ancestors, and the work on it."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.total = np.add(*fastest(problem, size))
        self.size, self.number = size, problem.batch_size / size  # a shorter last micro-batch counts as a fraction
        self.slowdown = max(_slowdowns(problem, self.total, size))
        self.ahead, self.parent = paths_ahead(returning(problem), self.total)
        self.longest = max(float(self.ahead.max(initial=0.0)), 1e-30)

    @property
    def work(self) -> Array:
        """Seconds of every unit in a step."""
        return self.number * self.total

    def working(self, last: float, further: Array | float = 0.0) -> Array:
        """Guesses 1 - a of the share of a step for which stages do not wait, `further` seconds behind each unit."""
        place: Array = np.minimum(1.0, (self.ahead + further) / self.longest)
        return 1 - last * place

    def behind(self, weights: Array) -> Array:
        """For every unit the sum of the weights of the units whose path contains it."""
        found = [0.0] * len(weights)
        for unit, weight in reversed(list(enumerate(weights.tolist()))):
            if self.parent[unit] >= 0:
                found[self.parent[unit]] += found[unit] + weight
        return np.array(found)


def _solve(choices: ReplicaRange, paths: _Paths, num_devices: float, memory: LeastMemory) -> float:
    """The smallest T of the inequality."""
    work = float(paths.work.sum())
    low, high = work / num_devices, work + float(paths.total.sum())
    waits = [_Waits(choices, paths, last) for last in GUESSES]
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        budget = num_devices * middle
        short = any(wait.needed(middle, budget, memory) > budget for wait in waits)
        low, high = (middle, high) if short else (low, middle)
    return low


class _Waits:
    """The right side of the inequality, if the last stage is guessed to wait for the share `last` of a step."""

    def __init__(self, choices: ReplicaRange, paths: _Paths, last: float) -> None:
        self.choices, self.paths, self.last = choices, paths, last
        working = paths.working(last)
        self.behind = paths.behind(paths.work / working**2)
        self.worth = (2 * working - 1) / working**2
        self.busy = self.worth * paths.number * choices.together
        self.summing = self.worth / paths.slowdown * choices.summing

    def needed(self, seconds: float, budget: float, memory: LeastMemory) -> float:
        """The device-seconds of a step of `seconds`, which has `budget` of them."""
        choices, paths = self.choices, self.paths
        devices = np.minimum(choices.most, paths.size)
        inside = devices / paths.working(self.last, devices * seconds / paths.number) ** 2
        often = np.maximum(0.0, self.behind / seconds - inside)
        forward, backward = self.busy + choices.forward * often, choices.backward * often
        costs = (forward + share * self.summing + (1 - share) * backward for share in SHARES)
        return max(_with_memory(each, memory, budget, float(self.worth.min())) for each in costs)


def _with_memory(costs: Array, memory: LeastMemory, budget: float, worth: float) -> float:
    """The least device-seconds of all units, by number of replicas and unit, at the best price of memory.

    `worth`: what running blocks again for a second counts.
    """

    def least(price: float) -> float:
        bytes_, rest = memory.priced(price * budget / memory.capacity, worth)
        return float(np.min(costs + bytes_, axis=0).sum()) + rest

    return max(map(least, PRICES))


def _bound_by_largest_unit(problem: Problem, size: int) -> float:
    """Seconds of the unit that takes longest, shared by as many devices as possible."""
    number = -(-problem.batch_size // size)
    smallest = problem.batch_size // number
    most = int(min(problem.max_replicas, problem.num_devices, smallest))
    kinds = range(len(problem.cluster.kinds))
    seconds = np.min([problem.seconds(-(-smallest // most), kind).total for kind in kinds], axis=0)
    return number * max(0.0, float(seconds.max(initial=0.0)))
