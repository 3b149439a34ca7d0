"""Lines and forks: the series-parallel tree in the form from which stages are cut, and which of its parts are alike.

Stages begin and end at cuts of a line; borders are the values that cross them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.graphpipe.series_parallel import (
    Fork,
    Line,
    LinePart,
    make_series_parallel,
)
from lightning_gpp.planning.problem.problem import Array, Problem
from lightning_gpp.planning.problem.units import Value

BUNDLES = (2, 3, 4)
"""Branches per bundle, which may be one stage, for forks with more branches than half the devices."""


def bundled(line: Line, size: int, weight: Callable[[Line], float]) -> Line:
    """The line with the lines of its forks in bundles of `size`, which are forks within forks; similar lines share one.

    A bundle may be one stage, or be divided like any fork. Forks of at most `size` lines stay as they are.
    """
    return Line(tuple(_bundled(part, size, weight) if isinstance(part, Fork) else part for part in line.parts))


def _bundled(fork: Fork, size: int, weight: Callable[[Line], float]) -> Fork:
    if len(fork.lines) <= size:
        return fork
    lines = sorted(fork.lines, key=weight, reverse=True)
    bundles = [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]
    return Fork(tuple(bundle[0] if len(bundle) == 1 else Line((Fork(bundle),)) for bundle in bundles))


class Likeness:
    """Numbers for lines: two lines have the same number if the same stages in them cost the same.

    `unit_kinds` says which units are alike. Of values with an end outside the line, only the bytes matter.
    """

    def __init__(self, problem: Problem, unit_kinds: Sequence[int]) -> None:
        self._kinds = unit_kinds
        self._values = problem.units.values
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Line, int] = {}
        self.touching: list[list[int]] = [[] for _ in unit_kinds]
        for index, value in enumerate(self._values):
            for unit in {value.src, *value.dsts}:
                self.touching[unit].append(index)

    def values(self, line: Line) -> list[Value]:
        """Values with an end in the line."""
        return [self._values[index] for index in sorted({v for unit in line.units for v in self.touching[unit]})]

    def number(self, line: Line) -> int:
        if line not in self._known:
            place = {unit: index for index, unit in enumerate(line.units)}
            parts = tuple(self._part(part) for part in line.parts)
            ends = tuple(sorted(_ends(value, place.get, lambda unit: -1) for value in self.values(line)))
            self._known[line] = self._numbers.setdefault((parts, ends), len(self._numbers))
        return self._known[line]

    def _part(self, part: LinePart) -> Hashable:
        return -1 - self._kinds[part] if isinstance(part, int) else tuple(self.number(line) for line in part.lines)

    def groups(self, line: Line, fork: Fork) -> tuple[tuple[int, ...], ...]:
        """The fork's lines by number; those of one group may be exchanged in all stages of `line`."""
        around = {unit: -3 - index for index, unit in enumerate(line.units)} | dict.fromkeys(fork.units, -2)
        found: dict[Hashable, list[int]] = {}
        for index, branch in enumerate(fork.lines):
            place = {unit: position for position, unit in enumerate(branch.units)}
            ends = tuple(
                sorted(_ends(value, place.get, lambda unit: around.get(unit, -1)) for value in self.values(branch))
            )
            found.setdefault((self.number(branch), ends), []).append(index)
        return tuple(tuple(members) for members in found.values())


def _ends(
    value: Value, inside: Callable[[int], int | None], outside: Callable[[int], int]
) -> tuple[float, float, int, bool, int, tuple[int, ...]]:
    """The bytes and flags of a value, and the places of its source and readers, the latter without repetitions."""

    def place(unit: int) -> int:
        found = inside(unit)
        return outside(unit) if found is None else found

    readers = tuple(sorted({place(unit) for unit in value.dsts}))
    return value.bytes.per_sample, value.bytes.fixed, value.num_directions, value.sliceable, place(value.src), readers


Bools = NDArray[np.bool_]
NONE = -1


@dataclass(frozen=True, slots=True)
class LineCut:
    """The border before part `part` of a line, at which a stage starts.

    If `group` is not NONE, it is moved into a branch of the fork before it: the stage gets the branch's parts from `at`
    on.
    """

    part: int
    group: int = NONE
    at: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LineShape:
    """Lines that are alike: one of them, its forks' groups of exchangeable lines, and all cuts.

    Args:
        line: one of them.
        groups: for every part its groups of exchangeable lines, none for a unit.
        branches: for every part the shapes of its groups.
        starts: cuts at which stages can start; they end before a part, or with the line.
        first: the indices of the plain cuts before each part.
        tails: the indices of the cuts into each part.
        after: masks of the units (as positions in the line) after each start.
        before: the same before each end: the parts from the second on, and the end of the line.
        border: see `borders`.
    """

    line: Line
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    branches: tuple[tuple[LineShape, ...], ...]
    starts: list[LineCut] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    tails: list[list[int]] = field(default_factory=list)
    after: Bools = field(init=False)
    before: Bools = field(init=False)
    border: Array = field(init=False)

    def __len__(self) -> int:
        return len(self.line.parts)


def shape_of(line: Line, likeness: Likeness, known: dict[int, LineShape]) -> LineShape:
    """The shape of a line; lines that are alike share it."""
    number = likeness.number(line)
    if number not in known:
        groups, branches = [], []
        for part in line.parts:
            found = likeness.groups(line, part) if isinstance(part, Fork) else ()
            groups.append(found)
            lines = part.lines if isinstance(part, Fork) else ()
            branches.append(tuple(shape_of(lines[group[0]], likeness, known) for group in found))
        shape = LineShape(line=line, groups=tuple(groups), branches=tuple(branches))
        _add_cuts(shape)
        shape.after = np.array([_behind(line, cut, shape) for cut in shape.starts])
        shape.before = np.array([_marked(line, Line(line.parts[: end + 1]).units) for end in range(len(shape))])
        shape.border = borders(shape, likeness.values(line))
        known[number] = shape
    return known[number]


def _add_cuts(shape: LineShape) -> None:
    for part in range(len(shape)):
        shape.first.append(len(shape.starts))
        shape.starts.append(LineCut(part))
        inner = [(group, len(branch)) for group, branch in enumerate(shape.branches[part])]
        tails = [LineCut(part + 1, group, at) for group, size in inner for at in range(size) if part + 1 < len(shape)]
        shape.tails.append(list(range(len(shape.starts), len(shape.starts) + len(tails))))
        shape.starts.extend(tails)


def tail_units(line: Line, cut: LineCut, member: int) -> tuple[int, ...]:
    """Units in branch `member` of the fork before the cut that belong to the stage that starts at the cut."""
    fork = line.parts[cut.part - 1] if cut.group != NONE else None
    return Line(fork.lines[member].parts[cut.at :]).units if isinstance(fork, Fork) else ()


def _behind(line: Line, cut: LineCut, shape: LineShape) -> list[bool]:
    member = shape.groups[cut.part - 1][cut.group][0] if cut.group != NONE else 0
    return _marked(line, tail_units(line, cut, member) + Line(line.parts[cut.part :]).units)


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
