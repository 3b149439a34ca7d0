"""Traces a solved dynamic program back to the stages of one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from lightning_gpp.planning.partitioners.graphpipe.lines import (
    NONE,
    Fork,
    Line,
    LineCut,
    LineShape,
    head_units,
    tail_units,
)
from lightning_gpp.planning.partitioners.graphpipe.solve import Solution, Solver, Way

Place: TypeAlias = tuple[int, int, int]
"""A part of a line, with the depth and the number of devices from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stage: its units, replicas, recomputation and seconds per sample.

    `in_flight`: the most micro-batches in flight, by the order of the tree.
    """

    units: tuple[int, ...]
    replicas: int
    recompute: bool
    seconds: float
    in_flight: int


def strategy(solver: Solver) -> list[Piece] | None:
    """Stages in topological order, with the fewest micro-batches in flight at the sources; None if there are none."""
    solution, devices = solver.whole(), solver.grid.num_devices
    depth = solver.grid.least(solution.values[0], devices)
    if depth is None:
        return None
    trace = _Trace(solver)
    trace.line(solution, solver.tables.line, (0, depth, devices))
    return trace.pieces


@dataclass(slots=True, eq=False)
class _Trace:
    solver: Solver
    pieces: list[Piece] = field(default_factory=list)

    def line(self, solution: Solution, line: Line, place: Place) -> Place:
        """Append the stages from a place on; returns the place at which the rest, after the line, starts."""
        while not any(at == place[0] and self._has(pairs, place[1:]) for at, pairs in solution.entries):
            first = solution.shape.first[place[0]]
            place = self._stage(solution, line, first, 0, place) or self._fork(solution, line, NONE, place)
        return place

    def _has(self, pairs: int, pair: Sequence[int]) -> bool:
        return bool(pairs & self.solver.grid.bit(pair[0], pair[1]))

    def _stage(self, solution: Solution, line: Line, start: int, member: int, place: Place) -> Place | None:
        """Append a stage that starts at a cut (into branch `member`), and the fork that it reaches into."""
        shape, (_, depth, devices) = solution.shape, place
        for shift, mask, free, bound in self.solver.moves(shape)[start]:
            replicas = shift - self.solver.grid.width
            if replicas > devices or depth < 1:
                continue
            wanted = self.solver.grid.bit(depth - 1, devices - replicas) & mask
            for end, limit in [*((end, mask) for end in free), *bound]:
                if solution.following[end] & wanted & limit:
                    self._add(shape, line, (start, end), member, replicas, depth)
                    cut = shape.ends[end]
                    rest = cut.part, depth - 1, devices - replicas
                    return rest if cut.group == NONE else self._fork(solution, line, end, rest)
        return None

    def _add(self, shape: LineShape, line: Line, cuts: tuple[int, int], member: int, replicas: int, depth: int) -> None:
        start, end = shape.starts[cuts[0]], shape.ends[cuts[1]]
        head = head_units(line, end, _head_member(shape, end))
        place = (replicas.bit_length() - 1, *cuts)
        costs = self.solver.tables.costs(shape)
        recompute = not (costs.seconds[place] <= self.solver.target and depth <= costs.room[place])
        piece = Piece(
            units=tail_units(line, start, member) + Line(line.parts[start.part : end.part]).units + head,
            replicas=replicas,
            recompute=recompute,
            seconds=float(costs.longer[place] if recompute else costs.seconds[place]),
            in_flight=depth,
        )
        self.pieces.append(piece)

    def _fork(self, solution: Solution, line: Line, head: int, place: Place) -> Place:
        """Append the stages of a fork's lines, and the stage behind it if one of them continues into it."""
        part, depth, devices = place
        way = next(
            way
            for way in self.solver.ways(solution, part)
            if way.head == head and self._has(way.pairs, (depth, devices))
        )
        shape, fork = solution.shape, line.parts[part]
        assert isinstance(fork, Fork)
        jobs, through = _jobs(self.solver, shape, part, way)
        work = [self._work(fork.lines[job.member], job.at) for job in jobs]
        work[-1] += self._work(line, part + 1)
        shares = self._shares([(job.solution, job.at) for job in jobs], work, depth, devices)
        left: Place = part, depth, devices
        for job, (level, share) in zip(jobs, shares, strict=True):
            left = self.line(job.solution, fork.lines[job.member], (job.at, level, share))
        if left[0] == len(shape.branches[part][way.through]):
            return part + 1, *left[1:]
        start = shape.starts.index(LineCut(part + 1, way.through, left[0]))
        behind = self._stage(solution, line, start, through, left)
        assert behind is not None
        return behind

    def _work(self, line: Line, part: int) -> float:
        """Seconds per micro-batch of a line from a part on, on one device."""
        option = self.solver.tables.options[0]
        units = list(Line(line.parts[part:]).units)
        return float((option.forward + option.backward)[units].sum())

    def _shares(
        self, items: Sequence[tuple[Solution, int]], work: Sequence[float], depth: int, devices: int
    ) -> list[tuple[int, int]]:
        """A depth (at most the given one) and a number of devices for every line, by its work; devices add up to those
        given.

        Any feasible shares meet the target. Shares by work make stages faster than the target if possible.
        """
        grid = self.solver.grid
        rows = [grid.until(solution.values[at], depth) for solution, at in items]
        rest = [1]
        for row in reversed(rows):
            rest.append(grid.sums(rest[-1], row))
        shares = []
        for index, ((solution, at), row, after) in enumerate(zip(items, rows, reversed(rest[:-1]), strict=True)):
            left = sum(work[index:])
            fair = devices * work[index] / left if left else 0.0
            able = [share for share in range(devices + 1) if row >> share & 1 and after >> devices - share & 1]
            share = min(able, key=partial(_distance, fair))
            level = grid.least(solution.values[at], share)
            assert level is not None
            shares.append((level, share))
            devices -= share
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remaining:
    """One line of a fork from one of its parts on."""

    solution: Solution
    at: int
    member: int


def _distance(fair: float, share: int) -> float:
    return abs(share - fair)


def _head_member(shape: LineShape, end: LineCut) -> int:
    """The line that a stage before a fork reaches into: the first of its group."""
    return shape.groups[end.part][end.group][0] if end.group != NONE else 0


def _jobs(solver: Solver, shape: LineShape, part: int, way: Way) -> tuple[list[_Remaining], int]:
    """All lines, with the one that continues behind the fork last, and that line's number."""
    left = [list(group) for group in shape.groups[part]]
    closed = [solver.closed(branch, way.depth) for branch in shape.branches[part]]
    jobs, at = [], 0
    if way.head != NONE:
        cut = shape.ends[way.head]
        at = cut.at if way.same else 0
        if not way.same:
            jobs.append(_Remaining(solution=closed[cut.group], at=cut.at, member=left[cut.group].pop(0)))
    through = left[way.through].pop(0)
    jobs.extend(
        _Remaining(solution=solution, at=0, member=member)
        for solution, members in zip(closed, left, strict=True)
        for member in members
    )
    return [*jobs, _Remaining(solution=way.passing, at=at, member=through)], through
