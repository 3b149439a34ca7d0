"""The dynamic program for one target: the pairs (depth, devices) with a strategy, from the sinks backwards.

Sets of such pairs are the bits of one integer. Bit `depth * width + devices` says that a strategy exists whose first
stages have at most `depth` micro-batches in flight and that uses exactly `devices` devices. One operation on integers
thus treats all depths and numbers of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from lightning_gpp.planning.partitioners.graphpipe.lines import LineShape
from lightning_gpp.planning.partitioners.graphpipe.tables import Counts, Tables


@dataclass(slots=True, eq=False)
class Grid:
    """Sets of pairs for a number of devices. A stage adds 1 to the depth, so no depth exceeds the number of devices."""

    num_devices: int
    width: int = field(init=False)
    row: int = field(init=False)
    _joined: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _up_to: dict[int, int] = field(default_factory=dict, init=False)
    _masks: dict[tuple[int, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.width = self.num_devices + 1
        self.row = (1 << self.width) - 1

    def bit(self, depth: int, devices: int) -> int:
        return 1 << depth * self.width + devices

    def mask(self, replicas: int, limit: int) -> int:
        """Pairs that may follow a stage with `replicas` replicas that has memory for `limit` micro-batches."""
        key = replicas, limit
        if key not in self._masks:
            row = (1 << self.width - replicas) - 1
            self._masks[key] = sum(row << depth * self.width for depth in range(min(limit, self.num_devices)))
        return self._masks[key]

    def up_to(self, devices: int) -> int:
        """All pairs of at most `devices` devices."""
        if devices not in self._up_to:
            row = (1 << max(0, devices + 1)) - 1
            self._up_to[devices] = sum(row << depth * self.width for depth in range(self.num_devices + 1))
        return self._up_to[devices]

    def rows(self, pairs: int) -> Iterator[tuple[int, int]]:
        """(depth, the devices as bits), by depth; pairs with a counterpart of less depth are left out."""
        seen, width = 0, self.width
        while pairs:
            depth = ((pairs & -pairs).bit_length() - 1) // width
            found = pairs >> depth * width & self.row
            if found & ~seen:
                yield depth, found & ~seen
            seen |= found
            pairs = pairs >> (depth + 1) * width << (depth + 1) * width

    def least(self, pairs: int, devices: int) -> int | None:
        """The least depth with exactly `devices` devices."""
        return next((depth for depth, row in self.rows(pairs) if row >> devices & 1), None)

    def join(self, left: int, right: int) -> int:
        """Pairs for both side by side: the larger depth, the sum of the devices."""
        if left == 1 or right == 1 or not (left and right):
            return right if left == 1 else left if right == 1 else 0
        key = (left, right) if left < right else (right, left)
        if key not in self._joined:
            self._joined[key] = self._join(left, right)
        return self._joined[key]

    def _join(self, left: int, right: int) -> int:
        lefts, rights = dict(self.rows(left)), dict(self.rows(right))
        result = seen = reach_left = reach_right = 0
        for depth in sorted({*lefts, *rights}):
            reach_left |= lefts.get(depth, 0)
            reach_right |= rights.get(depth, 0)
            found = self.sums(reach_left, reach_right) & ~seen
            result |= found << depth * self.width
            seen |= found
        return result

    def sums(self, left: int, right: int) -> int:
        """All sums of a number from `left` and one from `right`, up to the number of devices."""
        if left.bit_count() > right.bit_count():
            left, right = right, left
        result = 0
        while left:
            low = left & -left
            result |= right * low
            left ^= low
        return result & self.row

    def until(self, pairs: int, depth: int) -> int:
        """The devices, as bits, of all pairs with at most this depth."""
        found = 0
        for level, row in self.rows(pairs):
            if level <= depth:
                found |= row
        return found


T = TypeVar("T")

Moves: TypeAlias = list[tuple[int, int, Sequence[int], list[tuple[int, int]]]]
"""Stages that start at one cut, by replicas: shift, mask, and parts before which they end, without and with a mask."""

Entries: TypeAlias = tuple[tuple[int, int], ...]
"""Ends of a line with their continuations: (remaining parts of the line, pairs of the continuation)."""


@dataclass(slots=True, kw_only=True, eq=False)
class Solution:
    """The solution of a line with its continuation: pairs from each part on, and from the line's end on.

    `behind`: device-seconds per sample of what follows the line, if its devices count.
    """

    shape: LineShape
    entries: Entries
    values: list[int]
    behind: float


class Way(NamedTuple):
    """One way to pass a fork whose lines are divided.

    The line `through` continues into the stage behind the fork, or all lines end before it; what follows has depth
    `depth`.
    """

    depth: int
    through: int
    passing: Solution
    pairs: int


@dataclass(slots=True, eq=False)
class Solver:
    """Solves for one target, in seconds per sample; `states` counts the pairs found."""

    tables: Tables
    target: float
    grid: Grid
    states: int = 0
    _moves: dict[LineShape, list[Moves]] = field(default_factory=dict)
    _known: dict[tuple[LineShape, Entries, float], Solution] = field(default_factory=dict)
    _closed: dict[tuple[LineShape, int], Solution] = field(default_factory=dict)
    _all_work: float = field(init=False)

    def __post_init__(self) -> None:
        self._all_work = self.tables.work(self.tables.shape)[0]

    def whole(self) -> Solution:
        """The solution of the complete graph, which has no continuation."""
        shape = self.tables.shape
        return self.solve(shape, ((len(shape), self.grid.bit(0, 0)),))

    def solve(self, shape: LineShape, entries: Entries, work: float = 0.0) -> Solution:
        """Solve a line with what follows it. `work`: device-seconds per sample of the work on the entries' devices."""
        key = shape, entries, work
        if key not in self._known:
            self._known[key] = self._solve(shape, entries, work)
        return self._known[key]

    def _solve(self, shape: LineShape, entries: Entries, behind: float) -> Solution:
        values = [0] * (len(shape) + 1)
        solution = Solution(shape=shape, entries=entries, values=values, behind=behind)
        work = self.tables.work(shape)
        for part, pairs in entries:
            values[part] |= pairs
        moves = self.moves(shape)
        for part in reversed(range(len(shape))):
            values[part] |= _reached(moves[shape.first[part]], values)
            for way in self.ways(solution, part) if shape.branches[part] else ():
                values[part] |= way.pairs
            values[part] &= self._affordable(work[part] + behind)
            self.states += values[part].bit_count()
        return solution

    def _affordable(self, work: float) -> int:
        """Pairs that leave enough devices for all other work if those never wait; others lead nowhere."""
        num_devices = self.grid.num_devices
        most = int(num_devices - (self._all_work - work) / self.target + 1e-6)
        return self.grid.up_to(most if most < num_devices else num_devices)

    def moves(self, shape: LineShape) -> list[Moves]:
        """The moves from each start."""
        if shape not in self._moves:
            self._moves[shape] = self._found_moves(shape)
        return self._moves[shape]

    def _found_moves(self, shape: LineShape) -> list[Moves]:
        costs, plenty = self.tables.costs(shape), self.grid.num_devices
        places, caps = costs.within(self.target)
        free = caps >= plenty
        rows, ends = np.divmod(places, len(shape))
        ends += 1
        without = _by_row(rows[free], ends[free].tolist())
        tight = ~free
        limited = _by_row(rows[tight], list(zip(ends[tight].tolist(), caps[tight].tolist(), strict=True)))
        found: list[Moves] = [[] for _ in shape.starts]
        for row in sorted({*without, *limited}):
            option, start = divmod(row, len(shape.starts))
            replicas = self.tables.options[option].replicas
            own = [(end, self.grid.mask(replicas, cap)) for end, cap in limited.get(row, ())]
            mask = self.grid.mask(replicas, plenty)
            found[start].append((self.grid.width + replicas, mask, without.get(row, []), own))
        return found

    def ways(self, solution: Solution, part: int) -> Iterator[Way]:
        """All ways to pass the fork at `part`, whose later parts are solved."""
        for depth, entries in self._followers(solution, part).items():
            yield from self._passed(solution, part, depth, entries)

    def _followers(self, solution: Solution, part: int) -> dict[int, list[dict[int, int]]]:
        """Continuations by the depth behind the fork: for each of its lines, those by the remaining parts."""
        shape, moves = solution.shape, self.moves(solution.shape)
        found: dict[int, list[dict[int, int]]] = {}
        affordable = self._affordable(self.tables.work(shape)[part] + solution.behind)

        def add(branch: int, at: int, pairs: int) -> None:
            for depth, row in self.grid.rows(pairs & affordable):
                entries = found.setdefault(depth, [{} for _ in shape.branches[part]])
                entries[branch][at] = row << depth * self.grid.width

        add(0, len(shape.branches[part][0]), solution.values[part + 1])
        for start in shape.tails[part]:
            cut = shape.starts[start]
            add(cut.branch, cut.at, _reached(moves[start], solution.values))
        return found

    def _passed(self, solution: Solution, part: int, depth: int, entries: Sequence[dict[int, int]]) -> Iterator[Way]:
        shape, branches = solution.shape, solution.shape.branches[part]
        behind = solution.behind + self.tables.work(shape)[part + 1]
        for through, follow in enumerate(entries):
            if not follow:
                continue
            passing = self.solve(branches[through], tuple(sorted(follow.items())), behind)
            others = self._beside((*branches[:through], *branches[through + 1 :]), depth)
            yield Way(depth, through, passing, self.grid.join(passing.values[0], others))

    def closed(self, shape: LineShape, depth: int) -> Solution:
        """A line followed by a stage with `depth` micro-batches in flight, whose devices count elsewhere."""
        if (shape, depth) not in self._closed:
            self._closed[shape, depth] = self.solve(shape, ((len(shape), self.grid.bit(depth, 0)),))
        return self._closed[shape, depth]

    def _beside(self, branches: Iterable[LineShape], depth: int) -> int:
        """Pairs for lines side by side, all followed by a stage of that depth."""
        return reduce(self.grid.join, (self.closed(branch, depth).values[0] for branch in branches), 1)


def _by_row(rows: Counts, entries: Sequence[T]) -> dict[int, Sequence[T]]:
    """The entries of every row that has any; `rows` are ascending."""
    if not entries:
        return {}
    borders = [0, *(np.flatnonzero(rows[1:] != rows[:-1]) + 1).tolist(), len(entries)]
    return {
        row: entries[low:high] for row, (low, high) in zip(rows[borders[:-1]].tolist(), pairwise(borders), strict=True)
    }


def _reached(moves: Moves, values: Sequence[int]) -> int:
    """Pairs of all stages that start at a cut, with what follows them: pairs from each part on."""
    total = 0
    for shift, mask, free, bound in moves:
        pairs = 0
        for end in free:
            pairs |= values[end]
        for end, limit in bound:
            pairs |= values[end] & limit
        total |= (pairs & mask) << shift
    return total
