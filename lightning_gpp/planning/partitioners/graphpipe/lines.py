"""Lines and forks: the series-parallel tree in the form from which stages are cut.

Stages begin and end at cuts of a line; borders are the values that cross them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.graphpipe.series_parallel import Fork, Line, make_series_parallel
from lightning_gpp.planning.problem.problem import Array, Problem
from lightning_gpp.planning.problem.units import Value

BUNDLES = (2, 3, 4)
"""Branches per bundle, which may be one stage, for forks with more branches than half the devices."""


def bundled(line: Line, size: int, weight: Callable[[Line], float]) -> Line:
    """The line with the lines of its forks in bundles of `size`, which are forks within forks; heavy ones share one.

    A bundle may be one stage, or be divided like any fork. Forks of at most `size` lines stay as they are.
    """
    return Line(tuple(_bundled(part, size, weight) if isinstance(part, Fork) else part for part in line.parts))


def _bundled(fork: Fork, size: int, weight: Callable[[Line], float]) -> Fork:
    if len(fork.lines) <= size:
        return fork
    lines = sorted(fork.lines, key=weight, reverse=True)
    bundles = [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]
    return Fork(tuple(bundle[0] if len(bundle) == 1 else Line((Fork(bundle),)) for bundle in bundles))


Bools = NDArray[np.bool_]
NONE = -1


@dataclass(frozen=True, slots=True)
class LineCut:
    """The border before part `part` of a line, at which a stage starts.

    If `branch` is not NONE, it is moved into this line of the fork before it: the stage gets the line's parts from `at`
    on.
    """

    part: int
    branch: int = NONE
    at: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LineShape:
    """A line with the shapes of its forks' lines, and all cuts.

    Args:
        line: the line.
        branches: for every part the shapes of its lines, none for a unit.
        starts: cuts at which stages can start; they end before a part, or with the line.
        first: the indices of the plain cuts before each part.
        tails: the indices of the cuts into each part.
        after: masks of the units (as positions in the line) after each start.
        before: the same before each end: the parts from the second on, and the end of the line.
        border: see `borders`.
    """

    line: Line
    branches: tuple[tuple[LineShape, ...], ...]
    starts: list[LineCut] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    tails: list[list[int]] = field(default_factory=list)
    after: Bools = field(init=False)
    before: Bools = field(init=False)
    border: Array = field(init=False)

    def __len__(self) -> int:
        return len(self.line.parts)

    def units(self, start: LineCut, end: int) -> tuple[int, ...]:
        """The units of the stage between a cut and the end of a part."""
        fork = self.line.parts[start.part - 1] if start.branch != NONE else None
        tail = Line(fork.lines[start.branch].parts[start.at :]).units if isinstance(fork, Fork) else ()
        return tail + Line(self.line.parts[start.part : end]).units


def shape_of(line: Line, values: Iterable[Value]) -> LineShape:
    """The shape of a line, given all values with an end in it."""
    inside = set(line.units)
    touching = [value for value in values if value.src in inside or not inside.isdisjoint(value.dsts)]
    forks = (part.lines if isinstance(part, Fork) else () for part in line.parts)
    shape = LineShape(line=line, branches=tuple(tuple(shape_of(each, touching) for each in lines) for lines in forks))
    _add_cuts(shape)
    shape.after = np.array([_marked(line, shape.units(cut, len(shape))) for cut in shape.starts])
    shape.before = np.array([_marked(line, Line(line.parts[: end + 1]).units) for end in range(len(shape))])
    shape.border = borders(shape, touching)
    return shape


def _add_cuts(shape: LineShape) -> None:
    for part in range(len(shape)):
        shape.first.append(len(shape.starts))
        shape.starts.append(LineCut(part))
        inner = [(index, len(branch)) for index, branch in enumerate(shape.branches[part])]
        tails = [LineCut(part + 1, index, at) for index, size in inner for at in range(size) if part + 1 < len(shape)]
        shape.tails.append(list(range(len(shape.starts), len(shape.starts) + len(tails))))
        shape.starts.extend(tails)


def _marked(line: Line, units: Sequence[int]) -> list[bool]:
    chosen = set(units)
    return [unit in chosen for unit in line.units]


MESSAGES, PER_SAMPLE, FIXED, RIGID, INPUT_PER_SAMPLE, INPUT_FIXED = range(6)
"""Quantities in `borders`: messages, their bytes per sample and fixed bytes, values that cannot be cut, received bytes.
"""


def borders(shape: LineShape, values: Sequence[Value]) -> Array:
    """Quantities that cross the border of every stage, by [quantity, start, end], forward and backward.

    A value counts once on its way in, however many units read it, and once on its way out.
    """
    sums = np.zeros((6, len(shape.starts), len(shape)))
    place = {unit: index for index, unit in enumerate(shape.line.units)}
    for value in values:
        _add(sums, shape, value, place)
    return sums


def _weights(value: Value) -> tuple[float, ...]:
    size, directions = value.bytes, value.num_directions
    received = size.per_sample, size.fixed
    return directions, directions * size.per_sample, directions * size.fixed, float(not value.sliceable), *received


def _add(sums: Array, shape: LineShape, value: Value, place: dict[int, int]) -> None:
    read = np.zeros(sums.shape[1:], dtype=bool)
    all_read = np.full(sums.shape[1:], all(unit in place for unit in value.dsts))
    for unit in value.dsts:
        if unit in place:
            inside = _member(shape, place[unit])
            read |= inside
            all_read &= inside
    made = _member(shape, place[value.src]) if value.src in place else np.zeros_like(read)
    received = read & ~made
    crossing = received | (made & ~all_read)
    for quantity, weight in enumerate(_weights(value)):
        sums[quantity] += weight * (received if quantity >= INPUT_PER_SAMPLE else crossing)


def _member(shape: LineShape, index: int) -> Bools:
    return np.outer(shape.after[:, index], shape.before[:, index])


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


def converted(problem: Problem) -> Line:
    """The units in series-parallel order."""
    return make_series_parallel(problem.order, problem.seconds(problem.sizes[-1]).total.tolist())
