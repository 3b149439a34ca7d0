"""First drafts of a problem: two orders of the units, cut into equal stages with equal numbers of replicas.

The orders are topological ones that keep branches together; contiguous parts of an order never form a cycle. The most
promising ways to cut come first: M micro-batches through S equal stages take M + S - 1 times a stage's seconds, and the
reduction of its gradients. Memory is left to the moves that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import inf

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.draft import Draft, DraftStage, side_by_side
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


Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """One way to cut an order.

    Args:
        order: an order of all units.
        size: samples of a micro-batch.
        stages: number of stages.
        width: replicas of each.
        recompute: all stages recompute: their times include it, and micro-batches in flight need no memory.
        schedule: the name that drafts get.
    """

    order: Sequence[int]
    size: int
    stages: int
    width: int = 1
    recompute: bool = False
    schedule: str = "1f1b"


def variants(problem: Problem, found: Sequence[list[int]]) -> list[Cuts]:
    """Ways to cut, the shortest steps on paper first."""
    again = [flag for flag in (False, True) if problem.recompute in (None, flag)]
    ways = [
        Cuts(order=order, size=size, stages=stages, width=width, recompute=recompute, schedule=schedule)
        for order, size, (stages, width), schedule, recompute in product(
            found, problem.sizes, _counts(problem), problem.schedules, again
        )
        if width <= size
    ]
    return sorted(ways, key=partial(_step_on_paper, problem))


def _counts(problem: Problem) -> list[tuple[int, int]]:
    """Numbers of stages and of their replicas on all devices; if devices may be idle, also on a power of two of them,
    and on all but one.
    """
    most, used = problem.num_devices, {problem.num_devices}
    if problem.idle_devices:
        used |= {1 << shift for shift in range(most.bit_length()) if 1 << shift < most} | {max(1, most - 1)}
    pairs = (
        (number // width, width) for number in sorted(used) for width in range(1, number + 1) if number % width == 0
    )
    return [(stages, width) for stages, width in pairs if width <= problem.max_replicas and stages <= problem.num_units]


def _step_on_paper(problem: Problem, cuts: Cuts) -> float:
    """Seconds of a step with equal stages; infinite if their weights do not fit."""
    stages, replicas = cuts.stages, cuts.width
    if float(problem.static_bytes_of(replicas).sum()) / stages > float(problem.memory_bytes.max()):
        return inf
    table = problem.seconds(-(-cuts.size // replicas), slowest_kind(problem))
    work = float((table.total + (table.forward if cuts.recompute else 0.0)).sum()) / stages
    filling = 0.0 if problem.continuous else stages - 1
    gradients = float(problem.parameter_bytes.sum()) / stages
    summing = problem.cluster.all_reduce_seconds(range(replicas), gradients) if replicas > 1 else 0.0
    return (problem.batch_size / cuts.size + filling) * work + summing


def seed(problem: Problem, cuts: Cuts) -> Draft:
    """The draft of a way to cut into stages of equal work."""
    number, until = len(cuts.order), Table(problem, cuts).seconds[1:]
    targets = until[-1] * np.arange(1, cuts.stages) / cuts.stages
    stops, ends = np.abs(until[:, None] - targets).argmin(axis=0) + 1, list[int]()
    for left, stop in zip(range(cuts.stages - 1, 0, -1), stops.tolist(), strict=True):
        ends.append(min(max(stop, (ends or [0])[-1] + 1), number - left))
    return draft_of(problem, cuts, [*ends, number], [cuts.width] * cuts.stages)


class Table:
    """Prefix sums of seconds along the reversed order, and where stages end."""

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem, self.cuts = problem, cuts
        self.reverse = np.array(list(reversed(cuts.order)))
        self.seconds = self._prefix()

    def _prefix(self) -> Array:
        """Prefix sums of seconds per micro-batch, with its share of the all-reduce."""
        problem, cuts = self.problem, self.cuts
        table = problem.seconds(-(-cuts.size // cuts.width), slowest_kind(problem))
        total = table.total + (table.forward if cuts.recompute else 0.0)
        number = -(-problem.batch_size // cuts.size)
        summing = problem.cluster.all_reduce_seconds(range(cuts.width), 1e9) / 1e9 if cuts.width > 1 else 0.0
        each = total + problem.parameter_bytes * summing / number
        return np.concatenate([[0.0], np.cumsum(each[self.reverse])])

    def allowed(self, limit: float, num_following: int) -> Positions:
        """For every position, where a stage that begins there must end, with this many stages behind it: its units are
        connected, and fit the memory with one micro-batch in flight per following stage."""
        ends = np.searchsorted(self.seconds, self.seconds + limit * (1 + 1e-9), side="right") - 1
        ends = np.minimum(ends, self._fitting(0 if self.cuts.recompute else num_following))
        return np.minimum(ends, self._borders)

    def _fitting(self, num_following: int) -> Positions:
        """The same to fit the memory."""
        problem, width = self.problem, self.cuts.width
        saved = problem.saved_bytes(-(-self.cuts.size // width))
        needed = (problem.static_bytes_of(width) + (num_following + 1) * saved)[self.reverse]
        total = np.concatenate([[0.0], np.cumsum(needed)])
        return np.searchsorted(total, total + float(problem.memory_bytes.min()), side="right") - 1

    @cached_property
    def _borders(self) -> Positions:
        return _borders(self.problem, self.reverse)


def slowest_kind(problem: Problem) -> int:
    """The kind of device on which the model takes longest."""
    size = problem.sizes[-1]
    return max(range(len(problem.cluster.kinds)), key=lambda kind: float(problem.seconds(size, kind).total.sum()))


def _borders(problem: Problem, reverse: Positions) -> Positions:
    """For every position, the last end of a stage that begins there such that its units are connected."""
    num_units = len(reverse)
    neighbours = [{*problem.order.successors(unit), *problem.order.predecessors(unit)} for unit in map(int, reverse)]
    borders = np.full(num_units + 1, num_units, dtype=np.int64)
    for start in range(num_units):
        inside = {int(reverse[start])}
        for stop in range(start + 1, num_units):
            if inside.isdisjoint(neighbours[stop]):
                borders[start] = stop
                break
            inside.add(int(reverse[stop]))
    return borders


def draft_of(problem: Problem, cuts: Cuts, ends: list[int], replicas: list[int]) -> Draft:
    """The draft of these stages (from the sink); that of the user's step is last even if the order ends otherwise."""
    reverse, step = list(reversed(cuts.order)), problem.num_units - 1
    groups = [tuple(sorted(reverse[start:stop])) for start, stop in zip([0, *ends], ends, strict=False)][::-1]
    parts = sorted(zip(groups, reversed(replicas), strict=True), key=lambda part: step in part[0])
    stages = zip([units for units, _ in parts], side_by_side([count for _, count in parts]), strict=True)
    return Draft(
        stages=tuple(DraftStage(units=units, devices=where, micro_batch_size=cuts.size) for units, where in stages),
        schedule=cuts.schedule,
    )
