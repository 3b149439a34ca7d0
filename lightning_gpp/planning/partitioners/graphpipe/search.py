"""The search over targets and micro-batch sizes, and the drafts of its strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt

from lightning_gpp.cluster import Link
from lightning_gpp.planning.partitioners.graphpipe.lines import Fork, Line, LineShape, bundled, line_of
from lightning_gpp.planning.partitioners.graphpipe.solve import Grid, Solver
from lightning_gpp.planning.partitioners.graphpipe.tables import Tables
from lightning_gpp.planning.partitioners.graphpipe.trace import Piece, strategy
from lightning_gpp.planning.partitioners.series_parallel import Conversion, make_series_parallel
from lightning_gpp.planning.problem.draft import Devices, Draft, DraftStage, layouts, side_by_side
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Alternative, Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Problem

PRECISION = 1e-3
"""The result's bottleneck is at most this fraction above the best one."""

COARSE = 0.03
"""The same for a first, rough search per micro-batch size."""

PROMISING = 0.1
"""Sizes whose step is at most this fraction above the shortest are refined: a better bottleneck gains little, but
strategies with one bottleneck differ in the rest of the step.
"""

BUNDLES = (2, 3, 4)
"""Branches per bundle, which may be one stage, for forks with more branches than half the devices."""

FIRST_FACTORS = (1.25, 2.0, 2.0, 2.0, 2.0, 4.0, inf)
"""Factors from one target to the next until one is met; small ones first, because higher targets take longer.

If there is a size before this one, the first target is a little above its result.
"""

OBJECTIVE = "seconds per sample of the slowest stage, transfers and all-reduce included"


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
    conversion = converted(problem)
    found: list[_Size] = []
    states = 0
    for line in orders_of(problem, line_of(conversion.tree)):
        search = _GraphPipeSearch(problem=problem, control=control, line=line, inlined=conversion.inlined)
        found = sorted([*found, *search.run(found[0].seconds if found else inf)], key=lambda entry: entry.seconds)
        states += search.states
    best = found[0] if found else None
    return Answer(
        draft=best.draft if best else None,
        objective=best.high if best else inf,
        objective_name=OBJECTIVE,
        states=states,
        alternatives=tuple(_alternatives(found)),
        notes=tuple(_notes(conversion, search, best is not None)),
    )


def orders_of(problem: Problem, line: Line) -> Iterator[Line]:
    """The line itself, and if its forks have many branches, the line with these in bundles that may be stages."""
    seconds = problem.seconds(problem.sizes[-1]).total

    def weight(branch: Line) -> float:
        return float(seconds[list(branch.units)].sum())

    yield line
    most = max((len(part.lines) for part in line.parts if isinstance(part, Fork)), default=0)
    for size in BUNDLES if 2 * most > problem.num_devices else ():
        if size < most:
            yield bundled(line, size, weight)


def converted(problem: Problem) -> Conversion:
    """The units in series-parallel order, with the least delay found. Units with parameters are not repeated."""
    seconds = problem.seconds(problem.sizes[-1]).total
    keep = [unit for unit, num_bytes in enumerate(problem.parameter_bytes) if num_bytes]
    return make_series_parallel(problem.order, dict(enumerate(seconds.tolist())), keep=[*keep, problem.num_units - 1])


@dataclass(slots=True, kw_only=True, eq=False)
class _GraphPipeSearch:
    problem: Problem
    control: SearchControl
    line: Line
    inlined: tuple[object, ...]
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
        sizes = self._sizes()
        for number, entry in enumerate(sizes):
            if not (self.stopped and best < inf) and self._narrow(entry, COARSE, best / self.problem.batch_size):
                self._place(entry)
                best = min(best, entry.seconds)
                found.append(entry)
            self.control.report((number + 1) / len(sizes), best)
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
        known: dict[tuple[int, ...], LineShape] = {}
        links: dict[int, Link] = {}
        tables = [Tables(self.problem, size, self.line, schedule, known, links) for size in self.problem.sizes]
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
            evaluation = self.evaluator(draft, entry.seconds)
            if evaluation.fits and evaluation.seconds < entry.seconds:
                entry.draft, entry.seconds = draft, evaluation.seconds

    def _drafts(self, entry: _Size) -> Iterator[Draft]:
        """Drafts of the strategy. The stage of the user's step comes last, which is where layouts put device 0."""
        step = self.problem.num_units - 1
        pieces = sorted(with_inlined(self.problem, entry.pieces, self.inlined), key=lambda piece: step in piece.units)
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


def with_inlined(problem: Problem, pieces: Sequence[Piece], inlined: Sequence[object]) -> list[Piece]:
    """Put units that the tree lacks into the first stage that reads them, so that all edges lead forward."""
    stage_of = {unit: index for index, piece in enumerate(pieces) for unit in piece.units}
    added: dict[int, list[int]] = {}
    for unit in reversed(inlined):
        assert isinstance(unit, int)
        stage_of[unit] = min(stage_of[reader] for reader in problem.order.successors(unit))
        added.setdefault(stage_of[unit], []).append(unit)
    return [replace(piece, units=piece.units + tuple(added.get(index, ()))) for index, piece in enumerate(pieces)]


def _alternatives(found: Sequence[_Size]) -> Iterator[Alternative]:
    seen = [found[0].draft] if found else []
    for entry in found[1:]:
        if entry.draft is not None and entry.draft not in seen:
            seen.append(entry.draft)
            yield Alternative(
                draft=entry.draft,
                seconds=entry.seconds,
                reason=f"micro-batches of {entry.tables.size} samples make the step longer",
            )


def _notes(conversion: Conversion, search: _GraphPipeSearch, found: bool) -> Iterator[str]:
    if conversion.added:
        yield (
            f"The order of the units is not series-parallel: {len(conversion.added)} pairs without an order were put "
            f"in one, which makes the longest path {conversion.price - 1:.2%} longer."
        )
    if conversion.inlined:
        yield f"{len(conversion.inlined)} units of negligible cost that many others read were placed after the search."
    if search.stopped:
        yield f"The search stopped after {search.control.seconds:g} s; the bottleneck may be improved."
    if not found:
        yield (
            f"No stages fit the memory of the {search.problem.num_devices} devices of {search.problem.cluster.name!r} "
            "with every device used. Use more or larger devices, smaller micro-batches, or recompute=true."
        )
