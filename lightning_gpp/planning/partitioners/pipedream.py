"""PipeDream's partitioner: the units as one chain, cut and replicated by dynamic programming, level after level.

Sources: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1;
the optimizer released with it. Let A[s, e, m] be the slowest stage's seconds if m devices run the units s..e-1,

    A[s, e, m] = min( T(s, e, m),  min over c, m' of max( A[s, c, m - m'], transfer(c) / m', T(c, e, m') ) )

T is one stage with m replicas: its compute, plus the reduction of its gradients. On the next level of the cluster a
device is a group of the level below, and T(s, e, m) is A[s, e, all devices of the group] / m. Here seconds are per
micro-batch, and

* branches are put one after another, in the order of the units, and the stages run as that chain, as in GraphPipe's
  comparison;
* the pipeline is synchronous, so gradients are reduced once per mini-batch, not once per micro-batch: a micro-batch of
  b out of B samples pays b/B of it. The reduction is a ring (2(m - 1)/m of the bytes), as in the simulation; the
  release counts the 4(m - 1)/m of a parameter server. Groups reduce all gradients of a stage over one link (the
  release's base case, unlike its recurrence, has every device of the group send a part);
* the replicas of a stage share each micro-batch, so T on the innermost level takes the seconds of a share;
* memory: weights, gradients and optimizer state, and the activations of ceil(workers from here on / replicas)
  micro-batches, with the workers of the innermost group, as in the release. If no plan of several levels fits, all
  devices are one level, with the slowest link;
* stages recompute only if the problem demands it: PipeDream does not choose that;
* every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import (
    ChainCandidate,
    chained,
    choose,
    gradient_seconds,
    slowest_link,
    slowest_seconds,
)
from lightning_gpp.planning.problem.draft import DraftStage, side_by_side
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem

Level = tuple[int, float]
"""The number of groups of the level below that form one, and bytes per second between them."""

Placed = list[tuple[int, int, tuple[int, ...]]]
"""Stages from first to last: start, stop, devices. The last stage is on device 0."""


@register_partitioner("pipedream")
def pipedream(problem: Problem, control: SearchControl) -> Answer:
    """The chain of stages whose slowest stage is the fastest. States are the values that were compared."""
    levels = levels_of(problem)
    answer = _answer(problem, levels)
    if answer.draft is None and len(levels) > 1:
        return _answer(problem, _one_level(problem))
    return answer


def _answer(problem: Problem, levels: Sequence[Level]) -> Answer:
    candidates, states = list[ChainCandidate](), 0
    for size in problem.sizes:
        tables = solve(problem, size, levels)
        states += sum(table.states for table in tables)
        candidates += _candidates(problem, size, tables)
    return choose(problem, candidates, states)


def _candidates(problem: Problem, size: int, tables: Sequence[LevelTable]) -> Iterator[ChainCandidate]:
    seconds = tables[-1].best[-1, 0, problem.num_units]
    placed = place(tables, 0, problem.num_units) if seconds < np.inf else []
    nested = [devices for _, _, devices in placed]
    flat = side_by_side([len(devices) for devices in nested])
    if max(map(len, nested), default=0) > problem.max_replicas:
        return
    for layout in (flat, nested) if flat != nested else (flat,):
        stages = [
            DraftStage(
                units=tuple(range(start, stop)),
                devices=devices,
                micro_batch_size=size,
                recompute=problem.recompute is True and stop < problem.num_units,
            )
            for (start, stop, _), devices in zip(placed, layout, strict=True)
        ]
        draft = chained(problem, stages) if stages else None
        if draft is not None:
            yield ChainCandidate(float(seconds) / size, draft)


def levels_of(problem: Problem) -> list[Level]:
    """The levels of the cluster, innermost first.

    If groups differ in size or do not consist of neighbours, or single pairs of devices have links of their own, all
    devices form one level with the slowest of all links.
    """
    cluster, levels, inner = problem.cluster, list[Level](), 1
    for level in cluster.levels if not cluster.links else ():
        size = max(level.groups.count(group) for group in set(level.groups))
        blocks = [set(level.groups[start : start + size]) for start in range(0, cluster.num_devices, size)]
        if cluster.num_devices % size or size % inner or any(len(block) > 1 for block in blocks):
            return _one_level(problem)
        if size > inner:
            levels.append((size // inner, level.link.bytes_per_second))
        inner = size
    return levels if levels and inner == cluster.num_devices else _one_level(problem)


def _one_level(problem: Problem) -> list[Level]:
    return [(problem.num_devices, slowest_link(problem))]


def solve(problem: Problem, size: int, levels: Sequence[Level]) -> list[LevelTable]:
    """The tables of all levels, innermost first, for one micro-batch size."""
    spans, tables = Spans(problem, size), list[LevelTable]()
    for index, (count, bytes_per_second) in enumerate(levels):
        table = LevelTable(
            spans=spans,
            count=count,
            inner=prod(entry[0] for entry in levels[:index]),
            outer=prod(entry[0] for entry in levels[index + 1 :]),
            bytes_per_second=bytes_per_second,
            below=tables[-1].best[-1] if tables else None,
        )
        table.fill(range(1) if index == len(levels) - 1 else range(problem.num_units))
        tables.append(table)
    return tables


def place(tables: Sequence[LevelTable], start: int, stop: int) -> Placed:
    """The stages of a group's best solution for the units start..stop-1, with devices."""
    if not tables:
        return [(start, stop, (0,))]
    *below, table = tables
    placed: Placed = []
    offset = 0
    for first, last, count in table.cuts(start, stop):
        groups = [(offset + group) * table.inner for group in range(count)]
        placed = [
            (a, b, tuple(group + device for group in groups for device in devices))
            for a, b, devices in place(below, first, last)
        ] + placed
        offset += count
    return placed


@dataclass(slots=True, kw_only=True, eq=False)
class LevelTable:
    """A of one level, by [groups, start, stop]: each of `outer` larger groups has `count` groups of `inner` devices.

    `below`: the seconds of all spans on one group of the level below; None on the innermost one.
    """

    spans: Spans
    count: int
    inner: int
    outer: int
    bytes_per_second: float
    below: Array | None
    states: int = 0
    best: Array = field(init=False)
    cut: NDArray[np.int32] = field(init=False)
    share: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.count + 1, self.spans.num_units + 1, self.spans.num_units + 1)
        self.best = np.full(shape, np.inf)
        self.cut, self.share = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)

    def fill(self, starts: range) -> None:
        """Compute A for the spans that begin at `starts`."""
        first = slice(starts.start, starts.stop)
        transfers = self.spans.crossing_bytes[:, None] / self.bytes_per_second
        for number in range(1, self.count + 1):
            following = self.count - number
            self.best[number, first] = self._stage(number, following)[first]
            self.cut[number, first] = np.arange(self.spans.num_units + 1)[first, None]
            self.share[number, first] = number
            for last in range(1, number):
                seconds = np.maximum(self._stage(last, following), transfers / last)
                for start in starts:
                    self._extend(start, number, last, seconds)

    def _extend(self, start: int, number: int, last: int, seconds: Array) -> None:
        """Try a last stage on `last` of `number` groups, after every cut; `seconds` by [cut, stop]."""
        before = self.best[number - last, start, start + 1 : -1]
        tried = np.maximum(before[:, None], seconds[start + 1 : -1, start + 2 :])
        self.states += tried.size
        if tried.size:
            cuts = tried.argmin(axis=0)
            least = tried[cuts, np.arange(len(cuts))]
            stops = start + 2 + np.flatnonzero(least < self.best[number, start, start + 2 :])
            self.best[number, start, stops] = least[stops - start - 2]
            self.cut[number, start, stops] = start + 1 + cuts[stops - start - 2]
            self.share[number, start, stops] = last

    def _stage(self, number: int, following: int) -> Array:
        """T: seconds of a micro-batch in one stage on `number` groups, if `following` ones are behind it."""
        spans = self.spans
        if self.below is None:
            fits = spans.fitting(number, -(-(number + following) // number), self.outer)
            compute = np.where(fits, spans.seconds(-(-spans.size // number)), np.inf)
        else:
            compute = self.below / number
        part = spans.size / spans.problem.batch_size
        return compute + part * gradient_seconds(number, spans.parameter_bytes, self.bytes_per_second)

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Start, stop and groups of the stages of a span's best solution, last stage first."""
        number = self.count
        while number:
            cut, share = int(self.cut[number, start, stop]), int(self.share[number, start, stop])
            yield cut, stop, share
            stop, number = cut, number - share


class Spans:
    """Units in their topological order, for one micro-batch size, as tables by [start, stop]: units start..stop-1."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size, self.num_units = problem, size, problem.num_units
        self.recompute = problem.recompute is True

    def seconds(self, num_samples: int) -> Array:
        """Seconds of a forward and a backward for a share of `num_samples` samples, recomputation included."""
        forward, total = slowest_seconds(self.problem, num_samples)
        table = _sums(total)
        if self.recompute:
            table[:, :-1] += _sums(forward)[:, :-1]
        return np.where(np.triu(np.ones_like(table), 1) > 0, table, np.inf)

    def fitting(self, replicas: int, in_flight: int, outer: int) -> NDArray[np.bool_]:
        """Spans that may be a stage, with this number of micro-batches in flight, on each of `outer` groups."""
        problem, share = self.problem, -(-self.size // (replicas * outer))
        kept = 0.0 if self.recompute else _sums(problem.saved_bytes(share))
        most = min(in_flight, -(-problem.batch_size // self.size))
        fits: NDArray[np.bool_] = _sums(problem.static_bytes) + most * kept <= problem.memory_bytes.min()
        if replicas > 1:
            fits &= ~self.rigid & (replicas <= problem.max_replicas)
            fits[0, -1] &= problem.replicable
        return fits

    @cached_property
    def parameter_bytes(self) -> Array:
        return _sums(self.problem.parameter_bytes)

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes per micro-batch that cross each position, values forward and gradients backward."""
        crossing = np.zeros(self.num_units + 1)
        for value in self.problem.units.values:
            crossing[value.src + 1 : max(value.dsts) + 1] += value.num_directions * value.bytes.at(self.size)
        return crossing

    @cached_property
    def rigid(self) -> NDArray[np.bool_]:
        """Mask of spans without replicas, because data or values that enter or leave cannot be cut into shares."""
        rigid = _sums(np.array([not unit.divisible for unit in self.problem.units.units], dtype=float)) > 0
        for value in self.problem.units.values:
            if not value.sliceable:
                ends = np.zeros(self.num_units)
                ends[[value.src, *value.dsts]] = 1
                rigid |= (_sums(ends) > 0) & (_sums(ends) < ends.sum())
        return rigid


def _sums(values: Array) -> Array:
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums: Array = prefix[None, :] - prefix[:, None]
    return sums
