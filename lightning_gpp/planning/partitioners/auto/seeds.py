"""First shapes of a problem: two orders of the units, cut into stages with as equal numbers of replicas as possible.

The orders are topological ones that keep branches together; contiguous parts of an order never form a cycle. For every
number of stages and micro-batch size, the slowest stage is as fast as possible: stages are filled one after the other,
from the sink on, up to a limit of seconds, and a bisection finds the least limit with which they take all units. Every
stage has memory for one micro-batch in flight for each stage that follows it, and one more.

The most promising ways to cut come first: M micro-batches through S equal stages take M + S - 1 times a stage's
seconds, and the reduction of its gradients.

Where memory is scarce, stages may recompute as much as makes them fit (`Cuts.partly`): those ahead, which hold more
micro-batches, recompute more, and so get less work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.auto.scarce import ScarceMemory
from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.problem import Array, Problem


def orders(problem: Problem, weights: Array) -> list[list[int]]:
    """Orders of units branch by branch, heavy ones first, from either end of the graph; one if they are the same."""
    graph = problem.order
    backwards = graph.reverse()
    found = _branches(graph, _ranks(graph, weights)), _branches(backwards, _ranks(backwards, weights))[::-1]
    return [list(order) for order in dict.fromkeys(map(tuple, found))]


def _ranks(graph: nx.DiGraph, weights: Array) -> dict[int, tuple[float, int]]:
    """Sort keys of branches, heavy ones first."""
    return {unit: (-weight, unit) for unit, weight in _reaching(graph, weights).items()}


def _reaching(graph: nx.DiGraph, weights: Array) -> dict[int, float]:
    """For every unit the weight of the longest path that leads to it."""
    reached: dict[int, float] = {}
    for unit in nx.topological_sort(graph):
        reached[unit] = float(weights[unit]) + max((reached[source] for source in graph.predecessors(unit)), default=0)
    return reached


def _branches(graph: nx.DiGraph, ranks: Mapping[int, tuple[float, int]]) -> list[int]:
    """Depth-first order from the sinks: all that a unit needs comes before it, one branch after the other."""
    order: dict[int, None] = {}
    stack = sorted((unit for unit in graph if not graph.out_degree(unit)), key=ranks.__getitem__, reverse=True)
    while stack:
        unit = stack[-1]
        missing = sorted(
            (source for source in graph.predecessors(unit) if source not in order), key=ranks.__getitem__, reverse=True
        )
        if missing and unit not in order:
            stack.extend(missing)
        else:
            order.setdefault(stack.pop())
    return list(order)


BISECTIONS = 12
"""Bisections of the limit, which balance stages to a fraction of a percent."""

MAX_STAGES = 64
"""Most stages of a pipeline that are tried. Of more devices, equally many have to share each."""

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """One way to cut an order.

    Args:
        order: an order of all units.
        num_stages: number of stages.
        num_devices: the first devices to use.
        size: samples of a micro-batch.
        schedule: the name that shapes get.
        recompute: all stages recompute: their times include it, and micro-batches in flight need no memory.
        partly: stages recompute as much as makes them fit.
        fitting: stages fit the memory.
        borders: see `borders_of`.
    """

    order: Sequence[int]
    num_stages: int
    num_devices: int
    size: int
    schedule: str = "1f1b"
    recompute: bool = False
    partly: bool = False
    fitting: bool = True
    borders: Positions | None = field(default=None, compare=False, repr=False)

    @property
    def replicas(self) -> list[int]:
        """Number of replicas of every stage, from the sink on."""
        least, more = divmod(self.num_devices, self.num_stages)
        return [least + (stage < more) for stage in range(self.num_stages)]


def ways_to_cut(problem: Problem, found: Sequence[list[int]], num_devices: int) -> list[tuple[float, Cuts]]:
    """The ways to cut these orders for a number of devices, with the seconds of a step on paper, the shortest first."""
    ways = [(_step_on_paper(problem, cuts), cuts) for cuts in _all_cuts(problem, found, num_devices)]
    partly = [(seconds, replace(cuts, partly=True)) for seconds, cuts in ways if _is_scarce(problem, cuts)]
    return sorted([*ways, *partly], key=lambda way: way[0])


def _all_cuts(problem: Problem, found: Sequence[list[int]], num_devices: int) -> Iterator[Cuts]:
    again = [flag for flag in (False, True) if problem.recompute in (None, flag)]
    bordered = [(order, borders_of(problem, order)) for order in found]
    for (order, borders), number, size, schedule, recompute in product(
        bordered, _numbers(problem, num_devices), problem.sizes, problem.schedules, again
    ):
        cuts = Cuts(
            order=order,
            borders=borders,
            num_stages=number,
            num_devices=num_devices,
            size=size,
            schedule=schedule,
            recompute=recompute,
        )
        if cuts.replicas[0] <= size:
            yield cuts


def _numbers(problem: Problem, num_devices: int) -> list[int]:
    """Numbers of stages."""
    most = min(problem.num_units, num_devices, MAX_STAGES)
    numbers = [number for number in range(1, most + 1) if -(-num_devices // number) <= problem.max_replicas]
    equal = [number for number in numbers if num_devices % number == 0]
    return equal if equal and num_devices > MAX_STAGES else numbers


def _is_scarce(problem: Problem, cuts: Cuts) -> bool:
    """True if stages may recompute, and the first of equal ones would have to."""
    width = cuts.replicas[-1]
    saved = float(problem.saved_bytes(-(-cuts.size // width)).sum())
    needed = float(problem.static_bytes_of(width).sum()) / cuts.num_stages + saved
    return not cuts.recompute and problem.recompute is None and needed > float(problem.memory_bytes.min())


def _step_on_paper(problem: Problem, cuts: Cuts) -> float:
    """Seconds of a step with equal stages; infinite if their weights do not fit."""
    stages, replicas = cuts.num_stages, cuts.num_devices / cuts.num_stages
    if float(problem.static_bytes_of(cuts.replicas[-1]).sum()) / stages > float(problem.memory_bytes.max()):
        return inf
    table = problem.seconds(-(-cuts.size // cuts.replicas[0]), _slowest_kind(problem))
    work = float((table.total + (table.forward if cuts.recompute else 0.0)).sum()) / stages
    filling = 0.0 if problem.continuous else stages - 1
    gradients = float(problem.parameter_bytes.sum()) / stages
    summing = problem.cluster.all_reduce_seconds(range(cuts.replicas[0]), gradients) if replicas > 1 else 0.0
    return (problem.batch_size / cuts.size + filling) * work + summing


def cut(problem: Problem, cuts: Cuts) -> Shape | None:
    """The shape with the fastest slowest stage, whose units are connected if that is possible; None if nothing fits."""
    table = _Table(problem, cuts)
    ends = table.balanced(cuts.borders) or table.balanced(None)
    return _shape(problem, cuts, ends) if ends else None


class _Table:
    """Prefix sums along the reversed order, by number of replicas."""

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem, self.cuts, self.replicas = problem, cuts, cuts.replicas
        self.reverse = np.array(list(reversed(cuts.order)))
        self.seconds = {count: self._prefix(count) for count in set(self.replicas)}
        self._room: dict[tuple[int, int], Positions] = {}
        self._again: dict[tuple[int, int], Array] = {}

    def _prefix(self, replicas: int) -> Array:
        """Prefix sums of seconds per micro-batch, with its share of the all-reduce."""
        problem, size = self.problem, self.cuts.size
        table = problem.seconds(-(-size // replicas), _slowest_kind(problem))
        total = table.total + (table.forward if self.cuts.recompute else 0.0)
        number = -(-problem.batch_size // size)
        summing = problem.cluster.all_reduce_seconds(range(replicas), 1e9) / 1e9 if replicas > 1 else 0.0
        each = total + problem.parameter_bytes * summing / number
        return np.concatenate([[0.0], np.cumsum(each[self.reverse])])

    def balanced(self, borders: Positions | None) -> list[int]:
        """The ends of the stages with the least limit with which they suffice; none if none does."""
        high = max(float(row[-1]) for row in self.seconds.values())
        low, best = high / self.cuts.num_stages / 2, self._filled(high, borders)
        for _ in range(BISECTIONS if best else 0):
            middle = (low * high) ** 0.5
            ends = self._filled(middle, borders)
            best, low, high = (ends, low, middle) if ends else (best, middle, high)
        return best

    def _filled(self, limit: float, borders: Positions | None) -> list[int]:
        """The ends of stages of at most these seconds, which leave a unit for every stage that follows."""
        ends, most = [0], len(self.reverse) - self.cuts.num_stages
        for stage, replicas in enumerate(self.replicas):
            end = min(self._end(ends[-1], stage, replicas, limit), most + stage + 1)
            ends.append(end if borders is None else min(end, int(borders[ends[-1]])))
            if ends[-1] <= ends[-2]:
                return []
        return ends[1:] if ends[-1] == len(self.reverse) else []

    def _end(self, start: int, stage: int, replicas: int, limit: float) -> int:
        """The last end of a stage that begins at a position, with so many stages behind it."""
        row, latest = self.seconds[replicas], limit * (1 + 1e-9)
        if self.cuts.partly:
            again = self._recomputing(replicas, stage)[start]
            return int(np.flatnonzero(row[start:] - row[start] + again[start:] <= latest)[-1]) + start
        end = int(np.searchsorted(row, row[start] + latest, side="right")) - 1
        return min(end, int(self._fitting(replicas, stage)[start])) if self.cuts.fitting else end

    def _fitting(self, replicas: int, stage: int) -> Positions:
        """For every position, the last end of a stage that fits the memory."""
        key = replicas, 0 if self.cuts.recompute else stage
        if key not in self._room:
            problem = self.problem
            saved = problem.saved_bytes(-(-self.cuts.size // replicas))
            needed = (problem.static_bytes_of(replicas) + (key[1] + 1) * saved)[self.reverse]
            total = np.concatenate([[0.0], np.cumsum(needed)])
            self._room[key] = np.searchsorted(total, total + float(problem.memory_bytes.min()), side="right") - 1
        return self._room[key]

    def _recomputing(self, replicas: int, stage: int) -> Array:
        """Seconds of recomputation by the positions at which a stage starts and stops."""
        key = replicas, stage
        if key not in self._again:
            memory = ScarceMemory(self.problem, self.reverse, replicas, self.cuts.size)
            self._again[key] = memory.seconds(stage + 1)
        return self._again[key]


def _slowest_kind(problem: Problem) -> int:
    """The kind of device on which the model takes longest."""
    size = problem.sizes[-1]
    return max(range(len(problem.cluster.kinds)), key=lambda kind: float(problem.seconds(size, kind).total.sum()))


def borders_of(problem: Problem, order: Sequence[int]) -> Positions:
    """For every position from the sink on, the last end of a stage of connected units that begins there."""
    num_units, reverse = len(order), list(reversed(order))
    neighbours = [{*problem.order.successors(unit), *problem.order.predecessors(unit)} for unit in reverse]
    borders = np.full(num_units + 1, num_units, dtype=np.int64)
    for start in range(num_units):
        inside = {reverse[start]}
        for stop in range(start + 1, num_units):
            if inside.isdisjoint(neighbours[stop]):
                borders[start] = stop
                break
            inside.add(reverse[stop])
    return borders


def _shape(problem: Problem, cuts: Cuts, ends: list[int]) -> Shape:
    """The shape of these stages, with that of the user's step last even if the order ends with another sink."""
    reverse, step = list(reversed(cuts.order)), problem.num_units - 1
    starts = [0, *ends[:-1]]
    groups = [tuple(sorted(reverse[start:stop])) for start, stop in zip(starts, ends, strict=True)]
    stages = sorted(zip(groups[::-1], cuts.replicas[::-1], strict=True), key=lambda stage: step in stage[0])
    return Shape(
        groups=tuple(group for group, _ in stages),
        replicas=tuple(count for _, count in stages),
        size=cuts.size,
        schedule=cuts.schedule,
    )
