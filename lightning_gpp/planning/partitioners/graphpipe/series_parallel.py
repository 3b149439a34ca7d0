"""Series-parallel orders: the order of the units as lines of units and forks, with order added if needed.

An order is series-parallel if it can be built from single units by putting orders one after the other and side by side:
if and only if no four units form an N: a < c, b < c, b < d, and no other order among them (Valdes, Tarjan, Lawler, The
recognition of series parallel digraphs, SIAM J. Comput. 1982). Only the order counts, not edges that follow from
others: a chain with residual or skip connections, the skips of a U-Net included, is a chain.

A connected part that is not series-parallel becomes so only by a cut: into a first half, which holds all that its units
need, and the rest, which then waits for all of the first half. The critical path is at least the sum of both halves'
critical paths, the bound of the cut. The cut with the lowest bound is taken, and of these one that adds least order.

Units are numbered in a topological order. Sets of units are the bits of integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import networkx as nx


@dataclass(frozen=True, slots=True)
class Line:
    """Parts one after another: units, and forks of lines side by side. `units` are all units of the line, in order."""

    parts: tuple[LinePart, ...]
    units: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(unit for part in self.parts for unit in units_of(part)))


@dataclass(frozen=True, slots=True)
class Fork:
    """At least two lines without any order between them."""

    lines: tuple[Line, ...]
    units: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(unit for line in self.lines for unit in line.units))


LinePart: TypeAlias = int | Fork


def units_of(part: LinePart) -> tuple[int, ...]:
    return (part,) if isinstance(part, int) else part.units


def make_series_parallel(graph: nx.DiGraph, weights: Sequence[float]) -> Line:
    """The graph's own order if it is series-parallel; otherwise with order added as needed.

    Args:
        graph: units, numbered in a topological order.
        weights: seconds of all units, not negative.
    """
    return _Divided(graph, weights).line(tuple(graph))


Part: TypeAlias = tuple[int, ...]
"""Units of a part, ascending."""


class _Cut(NamedTuple):
    """A border: a lower bound of the critical path, the share of pairs across it that are new, and both halves."""

    bound: float
    share: float
    first: Part
    second: Part


class _Divided:
    """Divides an order into lines, with cuts where it is not series-parallel."""

    def __init__(self, graph: nx.DiGraph, weights: Sequence[float]) -> None:
        total = sum(weights[unit] for unit in graph) or 1.0
        self.graph = graph
        self.weights = [round(weight / total * 2**40) for weight in weights]  # sums without rounding errors
        self.before, self.after = dict[int, int](), dict[int, int]()
        for unit in sorted(graph):
            self.before[unit] = _union(self.before[other] | 1 << other for other in graph.pred[unit])
        for unit in sorted(graph, reverse=True):
            self.after[unit] = _union(self.after[other] | 1 << other for other in graph.succ[unit])

    def line(self, part: Part) -> Line:
        """A part as a line."""
        if len(part) == 1:
            return Line(part)
        pieces = self._components(part)
        if len(pieces) > 1:
            return Line((Fork(tuple(self.line(piece) for piece in pieces)),))
        pieces = self._consecutive(part)
        if len(pieces) == 1:
            cut = min(self._cuts(part))
            pieces = [cut.first, cut.second]
        return _joined([self.line(piece) for piece in pieces])

    def _components(self, part: Part) -> list[Part]:
        """The parts without any order between them, by their first unit."""
        rest, found = bits_of(part), list[Part]()
        while rest:
            inside, waiting = 0, rest & -rest
            while waiting:
                unit = waiting.bit_length() - 1
                inside |= 1 << unit
                waiting = (waiting | (self.before[unit] | self.after[unit]) & rest) & ~inside
            found.append(tuple(unit for unit in part if inside >> unit & 1))
            rest &= ~inside
        return found

    def _consecutive(self, part: Part) -> list[Part]:
        """The largest number of pieces such that all of one piece is before all of the next.

        Sorted by the number of units before them, the units of earlier pieces come first. There is a border wherever
        all pairs across it are ordered.
        """
        mask = bits_of(part)
        ordered = sorted(part, key=lambda unit: (self.before[unit] & mask).bit_count())
        across = enumerate(self._pairs_across(ordered), start=1)
        borders = [0, *(end for end, pairs in across if pairs == end * (len(part) - end))]
        return [tuple(sorted(ordered[start:stop])) for start, stop in pairwise(borders)]

    def _pairs_across(self, ordered: Sequence[int]) -> Iterator[int]:
        """Number of ordered pairs across the border behind each position of a topological order of a part."""
        mask = bits_of(ordered)
        return accumulate((self.after[u] & mask).bit_count() - (self.before[u] & mask).bit_count() for u in ordered)

    def _cuts(self, part: Part) -> Iterator[_Cut]:
        """The cuts after each position of two orders: by earliest end and by latest start, so that none has a lower
        bound than the best of these.
        """
        heads = _longest(self.graph, part, self.weights)
        tails = _longest(self.graph.reverse(copy=False), part[::-1], self.weights)
        for ordered in (sorted(part, key=heads.__getitem__), sorted(part, key=lambda unit: (-tails[unit], unit))):
            until = [*accumulate((heads[unit] for unit in ordered), max)]
            after = [*accumulate((tails[unit] for unit in reversed(ordered)), max)][::-1]
            for size, pairs in enumerate(self._pairs_across(ordered), start=1):
                if size < len(part) and (number := size * (len(part) - size)) > pairs:
                    halves = tuple(sorted(ordered[:size])), tuple(sorted(ordered[size:]))
                    yield _Cut(until[size - 1] + after[size], 1 - pairs / number, *halves)


def _joined(lines: Sequence[Line]) -> Line:
    """Lines one after the other."""
    return Line(tuple(part for line in lines for part in line.parts))


def _longest(graph: nx.DiGraph, part: Sequence[int], weights: Sequence[float]) -> Mapping[int, float]:
    """Weights of the heaviest paths inside a part, in topological order, that end at every unit, itself included."""
    ends: dict[int, float] = {}
    for unit in part:
        ends[unit] = weights[unit] + max((ends[other] for other in graph.pred[unit] if other in ends), default=0.0)
    return ends


def _union(masks: Iterator[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def bits_of(units: Sequence[int]) -> int:
    """The set of these units."""
    return sum(1 << unit for unit in units)
