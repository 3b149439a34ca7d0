"""The search over targets and micro-batch sizes, the strategies of its solutions, and their drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, sqrt
from typing import TypeAlias

from lightning_gpp.cluster import Link
from lightning_gpp.planning.partitioners.graphpipe.lines import LineCut, LineShape, converted, orders_of, shape_of
from lightning_gpp.planning.partitioners.graphpipe.series_parallel import Line
from lightning_gpp.planning.partitioners.graphpipe.solve import Grid, Solution, Solver
from lightning_gpp.planning.partitioners.graphpipe.tables import Tables
from lightning_gpp.planning.problem.draft import Devices, Draft, DraftStage, layouts, side_by_side
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Problem

PRECISION = 1e-3
"""The result's bottleneck is at most this fraction above the best one."""

COARSE = 0.03
"""The same for a first, rough search per micro-batch size."""

PROMISING = 0.1
"""Sizes whose step is at most this fraction above the shortest are refined: a better bottleneck gains little, but
strategies with one bottleneck differ in the rest of the step.
"""

FIRST_FACTORS = (1.25, 2.0, 2.0, 2.0, 2.0, 4.0, inf)
"""Factors from one target to the next until one is met; small ones first, because higher targets take longer.

If there is a size before this one, the first target is a little above its result.
"""

STATES_PER_EVALUATION = 200
"""The number of states that take as long as the evaluation of a draft."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Size:
    """The search for one micro-batch size: no strategy is as fast as `low`, and `pieces` is one that meets `high`.

    `seconds`: step time of `draft`, the best layout of the pieces.
    """

    tables: Tables
    low: float
    high: float = inf
    pieces: list[Piece] = field(default_factory=list)
    draft: Draft | None = None
    seconds: float = inf


@register_partitioner("graphpipe")
def graphpipe(problem: Problem, control: SearchControl) -> Answer:
    """The strategy whose slowest stage is fastest, at the micro-batch size with the shortest step; see the package."""
    found: list[_Size] = []
    states = 0
    for line in orders_of(problem, converted(problem)):
        search = _GraphPipeSearch(problem=problem, control=control, line=line)
        found = sorted([*found, *search.run(found[0].seconds if found else inf)], key=lambda entry: entry.seconds)
        states += search.states
    best = found[0] if found else None
    return Answer(
        draft=best.draft if best else None,
        objective=best.high if best else inf,
        states=states,
        alternatives=tuple(other.draft for other in found[1:] if other.draft),
        notes=tuple(_notes(search, best is not None)),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _GraphPipeSearch:
    problem: Problem
    control: SearchControl
    line: Line
    states: int = 0
    stopped: bool = False
    likely: float = 1.0
    evaluator: Evaluator = field(init=False)
    grid: Grid = field(init=False)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.problem)
        self.grid = Grid(self.problem.num_devices)

    def run(self, best: float = inf) -> list[_Size]:
        """Micro-batch sizes with a strategy, the shortest step first. `best`: step time found in another order."""
        if self.problem.static_bytes.sum() > self.problem.memory_bytes.sum():
            return []
        found: list[_Size] = []
        for entry in self._sizes():
            if not (self.stopped and best < inf) and self._narrow(entry, COARSE, best / self.problem.batch_size):
                self._place(entry)
                best = min(best, entry.seconds)
                found.append(entry)
        for entry in found:
            pieces = entry.pieces
            if entry.seconds <= best * (1 + PROMISING):
                self._narrow(entry, PRECISION, inf)
            if entry.pieces is not pieces:
                self._place(entry)
        return sorted((entry for entry in found if entry.draft), key=lambda entry: entry.seconds)

    def _sizes(self) -> list[_Size]:
        """Micro-batch sizes, the most promising first, so that others can be left out early."""
        schedule = "1f1b" if "1f1b" in self.problem.schedules else self.problem.schedules[0]
        shape, links = shape_of(self.line, self.problem.units.values), dict[int, Link]()
        tables = [Tables(self.problem, size, shape, schedule, links) for size in self.problem.sizes]
        entries = [_Size(tables=entry, low=entry.bound * (1 - 1e-9)) for entry in tables]
        return sorted(entries, key=lambda entry: entry.low)

    def _narrow(self, entry: _Size, precision: float, most: float) -> bool:
        """Binary search by ratios, upwards from the bound; false if there is no strategy of at most `most`."""
        bound, first = entry.low, entry.high == inf
        for factor in (self.likely, *FIRST_FACTORS):
            target = min(entry.low * factor, most)
            if entry.high == inf and entry.low < target and not self._try(entry, target):
                entry.low = target
        step = precision
        while entry.low * (1 + precision) < entry.high < inf:
            if self.control.expired:
                self.stopped = True
                break
            target = max(sqrt(entry.low * entry.high), entry.high / (1 + step))
            step *= 4
            if not self._try(entry, target):
                entry.low = target
        if first and entry.high < inf:
            self.likely = entry.high / bound * (1 + COARSE)
        return entry.high < inf

    def _try(self, entry: _Size, target: float) -> bool:
        solver = Solver(entry.tables, target, self.grid)
        pieces = strategy(solver)
        self.states += solver.states
        self.control.count(solver.states / STATES_PER_EVALUATION)
        if pieces is None:
            return False
        entry.pieces, entry.high = pieces, max(piece.seconds for piece in pieces)
        return True

    def _place(self, entry: _Size) -> None:
        """Choose the best layout of the pieces."""
        entry.draft, entry.seconds = None, inf
        if not entry.pieces:
            return
        for draft in self._drafts(entry):
            evaluation = self.evaluator(draft)
            if evaluation.fits and evaluation.seconds < entry.seconds:
                entry.draft, entry.seconds = draft, evaluation.seconds

    def _drafts(self, entry: _Size) -> Iterator[Draft]:
        """Drafts of the strategy. The stage of the user's step comes last, which is where layouts put device 0."""
        step = self.problem.num_units - 1
        pieces = sorted(entry.pieces, key=lambda piece: step in piece.units)
        for devices in layouts_of([piece.replicas for piece in pieces], self.problem.replicable):
            stages = tuple(
                DraftStage(
                    units=tuple(sorted(piece.units)),
                    devices=place,
                    micro_batch_size=entry.tables.size,
                    recompute=piece.recompute,
                )
                for piece, place in zip(pieces, devices, strict=True)
            )
            yield Draft(stages=stages, schedule=entry.tables.schedule)


def layouts_of(replicas: Sequence[int], copies: bool) -> Iterator[Devices]:
    """Stages side by side, in their order and by falling replicas: then powers of two never straddle nodes."""
    found = layouts(replicas)
    yield from found if copies else found[:1]
    last = len(replicas) - 1
    order = sorted(range(last), key=lambda index: replicas[index])
    if order != list(range(last)):
        places = side_by_side([replicas[index] for index in [*order, last]])
        yield [place for _, place in sorted(zip([*order, last], places, strict=True))]


def _notes(search: _GraphPipeSearch, found: bool) -> Iterator[str]:
    if search.stopped:
        yield "The search stopped before its end; the bottleneck may be improved."
    if not found:
        yield (
            f"No stages fit the memory of the {search.problem.num_devices} devices of {search.problem.cluster.name!r} "
            "with every device used. Use more or larger devices, smaller micro-batches, or recompute=true."
        )


# -- the stages of a solution -----------------------------------------------------------------------------------------

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
    trace.line(solution, (0, depth, devices))
    return trace.pieces


@dataclass(slots=True, eq=False)
class _Trace:
    solver: Solver
    pieces: list[Piece] = field(default_factory=list)

    def line(self, solution: Solution, place: Place) -> Place:
        """Append the stages from a place on; returns the place at which the rest, after the line, starts."""
        while not any(at == place[0] and self._has(pairs, place[1:]) for at, pairs in solution.entries):
            place = self._stage(solution, solution.shape.first[place[0]], place) or self._fork(solution, place)
        return place

    def _has(self, pairs: int, pair: Sequence[int]) -> bool:
        return bool(pairs & self.solver.grid.bit(pair[0], pair[1]))

    def _stage(self, solution: Solution, start: int, place: Place) -> Place | None:
        """Append a stage that starts at a cut; None if none leads on."""
        shape, (_, depth, devices) = solution.shape, place
        for shift, mask, free, bound in self.solver.moves(shape)[start]:
            replicas = shift - self.solver.grid.width
            if replicas > devices or depth < 1:
                continue
            wanted = self.solver.grid.bit(depth - 1, devices - replicas) & mask
            for end, limit in [*((end, mask) for end in free), *bound]:
                if solution.values[end] & wanted & limit:
                    self._add(shape, (start, end), replicas, depth)
                    return end, depth - 1, devices - replicas
        return None

    def _add(self, shape: LineShape, cuts: tuple[int, int], replicas: int, depth: int) -> None:
        start, end = cuts
        place = (replicas.bit_length() - 1, start, end - 1)
        costs = self.solver.tables.costs(shape)
        recompute = not (costs.seconds[place] <= self.solver.target and depth <= costs.room[place])
        piece = Piece(
            units=shape.units(shape.starts[start], end),
            replicas=replicas,
            recompute=recompute,
            seconds=float(costs.longer[place] if recompute else costs.seconds[place]),
            in_flight=depth,
        )
        self.pieces.append(piece)

    def _fork(self, solution: Solution, place: Place) -> Place:
        """Append the stages of a fork's lines, and the stage behind it if one of them, the last, continues into it."""
        part, depth, devices = place
        way = next(way for way in self.solver.ways(solution, part) if self._has(way.pairs, (depth, devices)))
        branches, starts = solution.shape.branches[part], solution.shape.starts
        closed = [self.solver.closed(branch, way.depth) for i, branch in enumerate(branches) if i != way.through]
        lines, left = [*closed, way.passing], place
        for line, (level, share) in zip(lines, self._shares(lines, depth, devices), strict=True):
            left = self.line(line, (0, level, share))
        if left[0] == len(branches[way.through]):
            return part + 1, *left[1:]
        behind = self._stage(solution, starts.index(LineCut(part + 1, way.through, left[0])), left)
        assert behind is not None
        return behind

    def _shares(self, lines: Sequence[Solution], depth: int, devices: int) -> Iterator[tuple[int, int]]:
        """A depth (at most the given one) and a number of devices for every line, which add up to those given.

        All that are possible meet the target; the first lines get the fewest.
        """
        grid = self.solver.grid
        rows = [grid.until(solution.values[0], depth) for solution in lines]
        rest = [*accumulate(reversed(rows), grid.sums, initial=1)]
        for solution, row, after in zip(lines, rows, rest[-2::-1], strict=True):
            share = next(count for count in range(devices + 1) if row >> count & 1 and after >> devices - count & 1)
            level = grid.least(solution.values[0], share)
            assert level is not None
            yield level, share
            devices -= share
