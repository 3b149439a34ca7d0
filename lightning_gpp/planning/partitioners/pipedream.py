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
  micro-batches. Inner levels do not know how many workers follow their group, so they leave out only stages that cannot
  fit in any group; every level above checks the stages that it takes over exactly;
* stages recompute only if the problem demands it: PipeDream does not choose that;
* every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import (
    ChainCandidate,
    Spans,
    chained,
    choose,
    gradient_seconds,
    levels_of,
)
from lightning_gpp.planning.problem.draft import DraftStage, side_by_side
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem

Placed = list[tuple[int, int, tuple[int, ...]]]
"""Stages from first to last: start, stop, devices. The last stage is on device 0."""


@register_partitioner("pipedream")
def pipedream(problem: Problem, control: SearchControl) -> Answer:
    """The chain of stages whose slowest stage is the fastest. States are cells of A, and what each was compared to."""
    return search(problem, control, HierarchyLevel)


def search(problem: Problem, control: SearchControl, level: type[HierarchyLevel]) -> Answer:
    """The same with a class of `level` that fills its tables in its own way."""
    candidates: list[ChainCandidate] = []
    states = 0
    for number, size in enumerate(problem.sizes, start=1):
        tables = solve(problem, size, level)
        states += sum(table.states for table in tables)
        candidates += _candidates(problem, size, tables)
        control.report(number / len(problem.sizes), np.inf)
    return choose(problem, candidates, states)


def _candidates(problem: Problem, size: int, tables: Sequence[HierarchyLevel]) -> Iterator[ChainCandidate]:
    seconds = tables[-1].best[-1, 0, problem.num_units]
    if not seconds < np.inf:
        return
    placed = place(tables, 0, problem.num_units)
    nested = [devices for _, _, devices in placed]
    flat = side_by_side([len(devices) for devices in nested])
    for layout in (flat, nested) if flat != nested else (flat,):
        draft = chained(
            problem,
            [
                DraftStage(
                    units=tuple(range(start, stop)),
                    devices=devices,
                    micro_batch_size=size,
                    recompute=problem.recompute is True and stop < problem.num_units,
                )
                for (start, stop, _), devices in zip(placed, layout, strict=True)
            ],
        )
        if draft is not None:
            yield ChainCandidate(float(seconds) / size, draft)


def solve(problem: Problem, size: int, kind: type[HierarchyLevel] | None = None) -> list[HierarchyLevel]:
    """The tables of all levels, innermost first, for one micro-batch size. `kind`: `HierarchyLevel` or a subclass."""
    spans, sizes = Spans(problem, size), levels_of(problem)
    levels: list[HierarchyLevel] = []
    below = Stages.of_one_device(spans)
    for index, (count, bytes_per_second) in enumerate(sizes):
        level = (kind or HierarchyLevel)(
            spans=spans,
            below=below,
            count=count,
            inner=prod(entry[0] for entry in sizes[:index]),
            outer=prod(entry[0] for entry in sizes[index + 1 :]),
            bytes_per_second=bytes_per_second,
            seconds=levels[-1].best[-1] if levels else None,
        )
        level.solve(range(1) if index == len(sizes) - 1 else range(problem.num_units))
        levels.append(level)
        below = level.stages()
    return levels


def place(levels: Sequence[HierarchyLevel], start: int, stop: int) -> Placed:
    """The stages of a group's best solution for the units start..stop-1, with devices."""
    if not levels:
        return [(start, stop, (0,))]
    *below, level = levels
    placed: Placed = []
    offset = 0
    for first, last, count in level.cuts(start, stop):
        groups = [(offset + group) * level.inner for group in range(count)]
        placed = [
            (a, b, tuple(group + device for group in groups for device in devices))
            for a, b, devices in place(below, first, last)
        ] + placed
        offset += count
    return placed


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of the best solutions of all spans on one group, as tables [start, stop, number of the stage].

    `workers`: devices of the group from the stage on, its own included. `replicas` is 0 if there is no stage.
    """

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    replicas: NDArray[np.int64]
    workers: NDArray[np.int64]

    @classmethod
    def of_one_device(cls, spans: Spans) -> Stages:
        starts, stops = np.indices((spans.num_units + 1, spans.num_units + 1))
        ones = np.ones_like(starts)
        return cls(*(table[:, :, None] for table in (starts, stops, ones, ones)))


class HierarchyLevel:
    """The dynamic program of one level: each of `outer` larger groups has `count` groups of `inner` devices."""

    def __init__(
        self,
        *,
        spans: Spans,
        below: Stages,
        count: int,
        inner: int,
        outer: int,
        bytes_per_second: float,
        seconds: Array | None,
    ) -> None:
        self.spans, self.below, self.count, self.inner, self.outer = spans, below, count, inner, outer
        self.bytes_per_second, self.seconds = bytes_per_second, seconds
        width = spans.num_units + 1
        self.best = np.full((count + 1, width, width), np.inf)
        self.cut = np.zeros((count + 1, width, width), dtype=np.int32)
        self.share = np.zeros((count + 1, width, width), dtype=np.int32)
        self.states = 0

    def solve(self, starts: range) -> None:
        """Fill A for the spans that begin at `starts`."""
        stage = [np.empty(0), *(self._stage_seconds(number) for number in range(1, self.count + 1))]
        room = [np.empty(0), *(self._room(number) for number in range(1, self.count + 1))]
        first = slice(starts.start, starts.stop)
        for number in range(1, self.count + 1):
            following = (self.count - number) * self.inner
            self.best[number, first] = np.where(room[number] >= following, stage[number], np.inf)[first]
            self.cut[number, first] = np.arange(self.spans.num_units + 1)[first, None]
            self.share[number, first] = number
            for last in range(1, number):
                transfers = self.spans.crossing_bytes / self.bytes_per_second / last
                seconds = np.maximum(np.where(room[last] >= following, stage[last], np.inf), transfers[:, None])
                self.extend(number, last, seconds, starts)
        lengths = [stop - start for start in starts for stop in range(start + 1, self.spans.num_units + 1)]
        transitions = sum(length - 1 for length in lengths)
        self.states += self.count * len(lengths) + self.count * (self.count - 1) // 2 * transitions

    def extend(self, number: int, last: int, seconds: Array, starts: range) -> None:
        """Try a last stage on `last` of `number` groups, starting at every cut, for all spans.

        `seconds`: the longer of that stage and of receiving its inputs, by [cut, stop].
        """
        for start in starts:
            before = self.best[number - last, start, start + 1 : -1]
            if not len(before):
                continue
            tried = np.maximum(before[:, None], seconds[start + 1 : -1, start + 2 :])
            cuts = tried.argmin(axis=0)
            least = tried[cuts, np.arange(len(cuts))]
            stops = start + 2 + np.flatnonzero(least < self.best[number, start, start + 2 :])
            self.best[number, start, stops] = least[stops - start - 2]
            self.cut[number, start, stops] = start + 1 + cuts[stops - start - 2]
            self.share[number, start, stops] = last

    def _stage_seconds(self, number: int) -> Array:
        """T: seconds of a micro-batch in one stage on `number` groups."""
        spans = self.spans
        compute = spans.seconds(-(-spans.size // number)) if self.seconds is None else self.seconds / number
        part = spans.size / spans.problem.batch_size
        return compute + part * gradient_seconds(number, spans.parameter_bytes, self.bytes_per_second)

    def _room(self, number: int) -> Array:
        """Number of workers that memory allows after the stages of a span on `number` groups; negative: none."""
        below, room = self.below, np.full(self.best.shape[1:], np.inf)
        for index in range(below.replicas.shape[2]):
            for replicas in np.unique(below.replicas[:, :, index]):
                if replicas:
                    here = below.replicas[:, :, index] == replicas
                    room[here] = np.minimum(room, self._room_of(index, int(replicas), number))[here]
        return room

    def _room_of(self, index: int, replicas: int, number: int) -> Array:
        """The same for the stages of that index, if they have that many replicas in each group."""
        start, stop = self.below.start[:, :, index], self.below.stop[:, :, index]
        table = self._room_of_spans(replicas * number)[start, stop]
        return table - self.below.workers[:, :, index] * number

    def _room_of_spans(self, replicas: int) -> Array:
        """Number of workers from a stage on, its own included, that memory allows, by the span of the stage."""
        spans = self.spans
        problem = spans.problem
        share = -(-spans.size // (replicas * self.outer))
        limit = problem.memory_bytes.min() - spans.static_bytes - spans.working_bytes(share)
        kept = spans.kept_bytes(share)
        num_micro_batches = -(-problem.batch_size // spans.size)
        most = np.floor(limit / np.where(kept > 0, kept, 1e-9))
        room = np.where(most >= num_micro_batches, np.inf, most * replicas)
        if replicas > problem.max_replicas:
            room[:] = -1
        if replicas > 1:
            room[spans.rigid] = -1
            if not problem.replicable:
                room[0, -1] = -1
        return room

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Start, stop and groups of the stages of a span's best solution, last stage first."""
        number = self.count
        while number:
            cut, share = int(self.cut[number, start, stop]), int(self.share[number, start, stop])
            yield cut, stop, share
            stop, number = cut, number - share

    def stages(self) -> Stages:
        """The stages of all spans at once."""
        starts, stops = np.indices(self.best.shape[1:])
        left, following = np.full_like(starts, self.count), np.zeros_like(starts)
        columns: list[tuple[NDArray[np.int64], ...]] = []
        for _ in range(self.count):
            cut, share = self.cut[left, starts, stops], self.share[left, starts, stops]
            share = np.where((left > 0) & np.isfinite(self.best[-1]), share, 0)
            columns += self._columns(cut, stops, share, following)
            stops, left, following = np.where(share > 0, cut, stops), left - share, following + share * self.inner
        return Stages(*(np.stack(tables, axis=2) for tables in zip(*columns, strict=True)))

    def _columns(
        self, start: NDArray[np.int64], stop: NDArray[np.int64], share: NDArray[np.int64], following: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], ...]]:
        below = self.below
        for index in range(below.replicas.shape[2]):
            replicas = below.replicas[start, stop, index] * share
            if index == 0 or replicas.any():
                workers = below.workers[start, stop, index] * share + following
                yield below.start[start, stop, index], below.stop[start, stop, index], replicas, workers
