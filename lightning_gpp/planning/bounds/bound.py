"""A lower bound on the step of every plan of a problem, whatever its stages, replicas and schedule.

For one micro-batch size b, with M micro-batches on K devices, let t_u = f_u + g_u be the forward and backward seconds
of unit u for b samples (replicas that share b samples take no less in total), W their sum, p_u the bytes of its
weights.

* The devices compute for M W seconds in total.
* A device waits for the first forwards of all stages ahead of its own, and after its last backward for theirs. Give
  every unit one path of ancestors, the longest over edges along which gradients come back (as for all paths here); let
  D_u be the units whose path contains u. Weight a device's units by their seconds, at most T per device: if r devices
  run u, all devices together wait for it for at least t_u(b / r) (M W(D_u) / T - r) seconds. This counts the work
  behind u, less that in the stage of u itself.
* r > 1 replicas of u reduce its gradients: 2 (r - 1) p_u / bandwidth seconds in total, over the links that r devices
  need. That may overlap with waiting for the last backwards, so a share s of it counts, and 1 - s of the waiting.
* Between its last forward and its last backward a device waits until that micro-batch has gone through all stages
  behind it and back. Meanwhile it runs at most M - 1 backwards: at most c = (M - 1) e T / M seconds, where e = max g_u
  / t_u is the largest share of a backward in a unit's seconds. Give every unit one path of descendants, the longest, of
  C_u seconds. Let H be any set of units, for example those for which C_u exceeds c, and H_u those of H whose path
  contains u. All devices together wait for u for at least t_u(b / r) (M W(H_u) / T - r) seconds; from the sum of these,
  c M W(H) / T is subtracted.
* Replicas take r t_u(b / r) seconds in total instead of t_u, M times: small shares are less efficient.

    K T >= M W - c M W(H) / T + sum_u min_r [ M (r t_u(b / r) - t_u)  +  2 s (r - 1) p_u / bandwidth_r
                                              + (f_u + (1 - s) g_u)(b / r) max(0, M W(D_u) / T - r)
                                              + t_u(b / r) max(0, M W(H_u) / T - r) ]

for any s in [0, 1] and H, also an empty one, and with the price of memory added (`memory`). A second of waiting is
worth less work on slower devices, so waiting is divided by the largest slowdown. The right side falls with T, so the
smallest T that satisfies it bounds the step from below. In addition, some stage has to run each unit M times, units are
never divided, and stages wait for the stage of a unit that all micro-batches pass (`capacity`). The
bound of the problem is the least of the bounds of its micro-batch sizes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

import networkx as nx
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
from lightning_gpp.planning.bounds.memory import LeastMemory, least_memory
from lightning_gpp.planning.problem.problem import Array, Problem, UnitSeconds

SHARES = (0.0, 0.5, 1.0)
"""Values of s that are tried; the best one counts."""

PRICES = (0.0, 0.03, 0.1, 0.2, 0.4, 1.0, 3.0)
"""Prices of all memory that are tried, as multiples of the device-seconds of a step; the best one counts."""

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
    began = time.perf_counter()
    bounds = {size: _Bounds(problem, size) for size in problem.sizes}
    queue = [(_bound_by_balance(problem, size), size) for size in problem.sizes]
    heapify(queue)
    while True:
        least, size = heappop(queue)
        if bounds[size].complete or time.perf_counter() - began >= seconds:
            return least
        heappush(queue, (bounds[size].better(least), size))


def busy_bound(problem: Problem) -> float:
    """Seconds of a step with all devices busy: no schedule beats it, with any number of stages per device."""
    return min(_bound_by_balance(problem, size) for size in problem.sizes)


def bound_of_size(problem: Problem, size: int) -> float:
    """The same for plans with micro-batches of `size` samples."""
    bounds, least = _Bounds(problem, size), _bound_by_balance(problem, size)
    while not bounds.complete:
        least = bounds.better(least)
    return least


def _bound_by_balance(problem: Problem, size: int) -> float:
    """All devices busy all the time."""
    forward, backward, devices = _fastest(problem, size)
    return problem.batch_size / size * float(np.sum(forward + backward)) / devices


class _Bounds:
    """The bounds of one size, computed one after the other: the size with the least bound is refined first."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size = problem, size
        self.bottlenecks = bottleneck_units(problem, np.add(*_fastest(problem, size)[:2]))
        self.capacities: Capacities | None = None

    @property
    def complete(self) -> bool:
        return self.capacities is not None and not self.bottlenecks

    def better(self, least: float) -> float:
        """The next bound, or what is known already."""
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
            forward=choice.forward,
            backward=choice.backward,
            summing=choice.summing / choice.fewest,
        )
        for choice in (_choice(problem, size, fewest, most) for fewest, most in _replica_ranges(problem, size))
    ]
    forward, backward, _ = _fastest(problem, size)
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


def _backward_share(problem: Problem, size: int) -> float:
    """The largest share of a backward in a unit's seconds."""
    tables = _tables(problem, size)
    return max(float((1 - table.forward / np.maximum(table.total, 1e-30)).max()) for table in tables)


def _bound_by_waiting(problem: Problem, size: int) -> float:
    forward, backward, speed = _fastest(problem, size)
    total = forward + backward
    choices = _stacked([_choice(problem, size, fewest, most) for fewest, most in _replica_ranges(problem, size)])
    paths = _Paths(problem, total, size)
    memory = least_memory(problem, size, choices.fewest[:, 0].astype(int).tolist())
    return _solve(choices, paths, speed, memory)


@dataclass(frozen=True, slots=True)
class _ReplicaRange:
    """Least costs of all units for any number of replicas from `fewest` to `most`; or of several ranges, as rows."""

    fewest: Any
    most: Any
    forward: Array
    backward: Array
    summing: Array
    """Device-seconds of reducing the gradients."""

    extra: Array
    """Device-seconds of a micro-batch beyond those on one device: small shares are less efficient."""

    @property
    def total(self) -> Array:
        return self.forward + self.backward


def _stacked(choices: Sequence[_ReplicaRange]) -> _ReplicaRange:
    """The ranges as rows."""
    columns = zip(*(astuple(choice) for choice in choices), strict=True)
    fewest, most, *others = (np.array(column, dtype=float) for column in columns)
    return _ReplicaRange(fewest[:, None], most[:, None], *others)


MAX_SINGLE, RANGE = 16, 1.15
"""Numbers of replicas up to `MAX_SINGLE` are looked at one by one, larger ones in ranges of this ratio."""


def _replica_ranges(problem: Problem, size: int) -> list[tuple[int, int]]:
    """Numbers of replicas: small ones singly, larger ones in ranges."""
    most = int(min(problem.max_replicas, problem.num_devices))
    starts = [*range(1, min(most, MAX_SINGLE) + 1)]
    while (following := int(starts[-1] * RANGE) + 1) <= most:
        starts.append(following)
    return list(zip(starts, [start - 1 for start in starts[1:]] + [most], strict=True))


def _choice(problem: Problem, size: int, fewest: int, most: int) -> _ReplicaRange:
    forward, backward, _ = _fastest(problem, max(1, size // most))
    summing = 2 * (fewest - 1) * problem.parameter_bytes / _bandwidth(problem, fewest)
    alone = np.add(*_fastest(problem, size)[:2])
    shared = fewest * np.add(*_fastest(problem, max(1, size // fewest))[:2])
    return _ReplicaRange(fewest, most, forward, backward, summing, np.maximum(0.0, shared - alone))


def _bandwidth(problem: Problem, replicas: int) -> float:
    """Bandwidth of the slowest link that any choice of this number of devices has to use."""
    single = [link.bytes_per_second for link in problem.cluster.links.values()]
    for level in problem.cluster.levels:
        if max(Counter(level.groups).values()) >= replicas:
            return max([level.link.bytes_per_second, *single])
    return max([level.link.bytes_per_second for level in problem.cluster.levels] + single)


def _fastest(problem: Problem, size: int) -> tuple[Array, Array, float]:
    """Seconds of all units on their fastest kind of device, and how many such devices the cluster equals."""
    tables = [problem.seconds(size, kind) for kind in range(len(problem.cluster.kinds))]
    forward = np.min([table.forward for table in tables], axis=0)
    total = np.min([table.total for table in tables], axis=0)
    slowdowns = _slowdowns(problem, total, size)
    worth = sum(1 / slowdowns[problem.cluster.kind(device)] for device in range(problem.num_devices))
    return np.minimum(forward, total), total - np.minimum(forward, total), worth


def _slowdowns(problem: Problem, total: Array, size: int) -> list[float]:
    """Slowdown of every kind of device relative to the fastest, for the unit where it is smallest."""
    tables = [problem.seconds(size, kind) for kind in range(len(problem.cluster.kinds))]
    return [max(1.0, float(np.min(table.total / np.maximum(total, 1e-30)))) for table in tables]


class _Paths:
    """The longest paths to and from every unit, and the work on them."""

    def __init__(self, problem: Problem, total: Array, size: int) -> None:
        self.total, self.number = total, problem.batch_size / size  # a shorter last micro-batch counts as a fraction
        self.most = -(-problem.batch_size // size)
        self.slowdown = max(_slowdowns(problem, total, size))
        order = _returning(problem)
        self.behind = self.number * _behind(order, total)
        self.after, self.child = _after(order, total)
        self.backward_share = _backward_share(problem, size)
        self.work = self.number * float(total.sum())

    def waiting(self, seconds: float) -> tuple[Array, float]:
        """For a step of `seconds`: how often each unit is waited for in the middle, and the seconds to subtract."""
        allowed = seconds * (self.most - 1) * self.backward_share / self.number
        weights = np.where(self.after > allowed, self.total * self.number / seconds, 0.0)
        often = [0.0] * len(weights)
        for unit, (child, weight) in enumerate(zip(self.child, weights.tolist(), strict=True)):
            if child >= 0:
                often[child] += often[unit] + weight
        return np.array(often), allowed * float(weights.sum())


def _returning(problem: Problem) -> nx.DiGraph:
    """The graph of units with only the edges along which gradients come back: along others, no backward waits."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.num_units))
    for value in problem.units.values:
        if value.num_directions == 2 and value.bytes.at(1) > 0:
            graph.add_edges_from((value.src, dst) for dst in value.dsts)
    return graph


def _behind(order: nx.DiGraph, total: Array) -> Array:
    """For every unit the seconds of the units whose longest path of ancestors contains it."""
    num_units = len(total)
    parent, length = [-1] * num_units, [0.0] * num_units
    for unit in range(num_units):
        for before in order.predecessors(unit):
            if length[before] + total[before] > length[unit] or parent[unit] < 0:
                parent[unit], length[unit] = before, length[before] + total[before]
    behind = np.zeros(num_units)
    for unit in reversed(range(num_units)):
        if parent[unit] >= 0:
            behind[parent[unit]] += behind[unit] + total[unit]
    return behind


def _after(order: nx.DiGraph, total: Array) -> tuple[Array, list[int]]:
    """For every unit the seconds of its longest path of descendants, and that path's first unit; -1 for sinks."""
    num_units = len(total)
    after, child = np.zeros(num_units), [-1] * num_units
    for unit in reversed(range(num_units)):
        following = list(order.successors(unit))
        if following:
            child[unit] = max(following, key=lambda other: float(after[other] + total[other]))
            after[unit] = after[child[unit]] + total[child[unit]]
    return after, child


def _solve(choices: _ReplicaRange, paths: _Paths, num_devices: float, memory: LeastMemory) -> float:
    """The smallest T of the inequality."""
    low, high = paths.work / num_devices, paths.work + float(paths.total.sum())
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        idle = max(
            _with_memory(costs / paths.slowdown, memory, num_devices * middle) - allowed / paths.slowdown
            for costs, allowed in _costs(choices, paths, middle)
        )
        low, high = (middle, high) if num_devices * middle < paths.work + idle else (low, middle)
    return low


def _costs(choices: _ReplicaRange, paths: _Paths, seconds: float) -> Iterator[tuple[Array, float]]:
    """Device-seconds by number of replicas and unit for each s and H, and those to subtract."""
    ahead = np.maximum(0.0, paths.behind / seconds - choices.most)
    often, allowed = paths.waiting(seconds)
    behind = choices.total * np.maximum(0.0, often - choices.most)
    for share in SHARES:
        costs = paths.number * choices.extra + share * choices.summing
        costs = costs + (choices.forward + (1 - share) * choices.backward) * ahead
        yield costs, 0.0
        if allowed:
            yield costs + behind, allowed


def _with_memory(costs: Array, memory: LeastMemory, budget: float) -> float:
    """The least device-seconds of all units, by number of replicas and unit, at the best price of memory."""

    def least(price: float) -> float:
        bytes_, rest = memory.priced(price * budget / memory.capacity)
        return float(np.min(costs + bytes_, axis=0).sum()) + rest

    return max(map(least, PRICES))


def _bound_by_largest_unit(problem: Problem, size: int) -> float:
    """Seconds of the unit that takes longest, shared by as many devices as possible."""
    most = int(min(problem.max_replicas, problem.num_devices, size))
    number = problem.batch_size // size
    kinds = range(len(problem.cluster.kinds))
    return number * max(
        0.0, float(np.min([problem.seconds(-(-size // most), kind).total for kind in kinds], axis=0).max(initial=0.0))
    )
