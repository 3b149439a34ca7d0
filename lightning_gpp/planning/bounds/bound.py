"""A lower bound on the step of every plan of a problem, whatever its stages, replicas and schedule.

Some stage has to run each unit for all micro-batches, units are never divided, and stages wait for the stage of a unit
that all micro-batches pass (`capacity`), and for each other along a path (`path`). Replicas of a unit share the samples
of a micro-batch; the largest share is that of the last one, for which the others wait if all devices are equally fast.
The bound of the problem is the least of the bounds of its micro-batch sizes.

Not included is that memory limits stages and micro-batches in flight.
"""

from __future__ import annotations

import time
from dataclasses import replace
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
from lightning_gpp.planning.bounds.longest_path import path_bound
from lightning_gpp.planning.bounds.path import PathBound
from lightning_gpp.planning.bounds.replica_costs import fastest, range_costs
from lightning_gpp.planning.problem.problem import Array, Problem, UnitSeconds

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
        largest = _bound_by_largest_unit(self.problem, self.size)
        return max(least, largest, bound_by_capacity(self.capacities, self.problem.num_devices))


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


def _bound_by_largest_unit(problem: Problem, size: int) -> float:
    """Seconds of the unit that takes longest, shared by as many devices as possible."""
    number = -(-problem.batch_size // size)
    smallest = problem.batch_size // number
    most = int(min(problem.max_replicas, problem.num_devices, smallest))
    kinds = range(len(problem.cluster.kinds))
    seconds = np.min([problem.seconds(-(-smallest // most), kind).total for kind in kinds], axis=0)
    return number * max(0.0, float(seconds.max(initial=0.0)))
