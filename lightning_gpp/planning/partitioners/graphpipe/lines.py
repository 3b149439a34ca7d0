"""Lines and forks: the series-parallel tree in the form in which stages are cut from it, and what is alike in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_gpp.planning.partitioners.series_parallel import Tree, evaluate
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import Value


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Parts one after another: units, and forks whose lines run side by side. `units` are all of them, in order."""

    parts: tuple[LinePart, ...]
    units: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(unit for part in self.parts for unit in units_of(part)))


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """At least two lines without any order between them."""

    lines: tuple[Line, ...]
    units: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(unit for line in self.lines for unit in line.units))


LinePart: TypeAlias = int | Fork


def units_of(part: LinePart) -> tuple[int, ...]:
    return (part,) if isinstance(part, int) else part.units


def line_of(tree: Tree) -> Line:
    """The tree as a line: a single unit or fork is a line of one part."""

    def side_by_side(parts: list[LinePart | Line]) -> LinePart | Line:
        return Fork(tuple(_as_line(part) for part in parts))

    def in_series(parts: list[LinePart | Line]) -> LinePart | Line:
        return Line(tuple(part for part in parts if not isinstance(part, Line)))

    def unit(node: Hashable) -> LinePart | Line:
        assert isinstance(node, int)
        return node

    return _as_line(evaluate(tree, leaf=unit, series=in_series, parallel=side_by_side))


def _as_line(part: LinePart | Line) -> Line:
    return part if isinstance(part, Line) else Line((part,))


def bundled(line: Line, size: int, weight: Callable[[Line], float]) -> Line:
    """The line with the lines of its forks in bundles of `size`, like ones together: forks within forks.

    A bundle may be one stage, or be divided like any fork. Forks of no more lines stay as they are.
    """
    return Line(tuple(_bundled(part, size, weight) if isinstance(part, Fork) else part for part in line.parts))


def _bundled(fork: Fork, size: int, weight: Callable[[Line], float]) -> Fork:
    if len(fork.lines) <= size:
        return fork
    lines = sorted(fork.lines, key=weight, reverse=True)
    bundles = [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]
    return Fork(tuple(bundle[0] if len(bundle) == 1 else Line((Fork(bundle),)) for bundle in bundles))


class Likeness:
    """Numbers for lines: the same number for lines in which the same stages cost the same.

    `unit_kinds` says which units are alike. Values with an end outside of a line count by what they weigh only.
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
    """The bytes and flags of a value, its source, and its readers without repetitions."""

    def place(unit: int) -> int:
        found = inside(unit)
        return outside(unit) if found is None else found

    readers = tuple(sorted({place(unit) for unit in value.dsts}))
    return value.bytes.per_sample, value.bytes.fixed, value.num_directions, value.sliceable, place(value.src), readers
