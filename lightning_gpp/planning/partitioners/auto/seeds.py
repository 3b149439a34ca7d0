"""First shapes of a problem: two orders of the units, cut into stages with replicas.

Pipelines with equal numbers of replicas come first, the most promising before the others: M micro-batches through S
equal stages take M + S - 1 times a stage's seconds, and the reduction of its gradients.

The orders are topological ones that keep branches together; contiguous parts of an order never form a cycle.

The slowest stage of a cut is as fast as possible. For one order, one micro-batch size and one limit on a stage's
seconds, a dynamic program finds for every number of stages s and devices k the longest suffix of the order that s
stages on k devices can run within the limit:

    reach[s][k] = max over r of extend_r(reach[s - 1][k - r])

where extend_r(i) is the position at which a stage with r replicas that begins at i (counted from the sink) must end.
The limit rises in small steps from perfect balance; for every number of stages the first limit that suffices gives a
shape.

Where memory is scarce, stages of one size may recompute as much as makes them fit (`Cuts.partly`): those ahead, which
hold more micro-batches, recompute more, and so get less work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.problem import Array, Problem


def orders(problem: Problem, weights: Array) -> list[list[int]]:
    """Orders of units branch by branch, heavy ones first, from either end of the graph; one if they are the same."""
    graph = problem.order
    backwards = graph.reverse()
    found = _branches(graph, _ranks(graph, weights)), _branches(backwards, _ranks(backwards, weights))[::-1]
    return [list(order) for order in dict.fromkeys(map(tuple, found))]


def _ranks(graph: nx.DiGraph, weights: Array) -> dict[int, tuple[float, int]]:
    """Sort keys of branches, heavy ones first."""
    return {unit: (-weight, unit) for unit, weight in _reaching(graph, weights).items()}


def _reaching(graph: nx.DiGraph, weights: Array) -> dict[int, float]:
    """For every unit the weight of the longest path that leads to it."""
    reached: dict[int, float] = {}
    for unit in nx.topological_sort(graph):
        reached[unit] = float(weights[unit]) + max((reached[source] for source in graph.predecessors(unit)), default=0)
    return reached


def _branches(graph: nx.DiGraph, ranks: Mapping[int, tuple[float, int]]) -> list[int]:
    """Depth-first order from the sinks: all that a unit needs comes before it, one branch after the other."""
    order: dict[int, None] = {}
    stack = sorted((unit for unit in graph if not graph.out_degree(unit)), key=ranks.__getitem__, reverse=True)
    while stack:
        unit = stack[-1]
        missing = sorted(
            (source for source in graph.predecessors(unit) if source not in order), key=ranks.__getitem__, reverse=True
        )
        if missing and unit not in order:
            stack.extend(missing)
        else:
            order.setdefault(stack.pop())
    return list(order)


FINE, COARSE = 40, 10
"""Numbers of limits on a stage's seconds to try: up to three times perfect balance, and from there to all work."""

BISECTIONS, EQUAL_BISECTIONS = 4, 12
"""Bisections between the last two limits, and all for equal stages, which balance them to a fraction of a percent."""

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """One way to search for cuts of an order.

    Args:
        order: an order of all units.
        size: samples of a micro-batch.
        width: devices are assigned in groups of this size.
        apart: the units of a stage must be connected.
        recompute: all stages recompute: their times include it, and micro-batches in flight need no memory.
        schedule: the name that shapes get.
        fitting: stages fit the memory, with one micro-batch in flight per following stage.
        num_devices: the first devices to use; 0: all.
        equal: every stage has one group of devices.
        partly: stages recompute as much as makes them fit; only with `equal`.
    """

    order: Sequence[int]
    size: int
    width: int = 1
    apart: bool = False
    recompute: bool = False
    schedule: str = "1f1b"
    fitting: bool = False
    num_devices: int = 0
    equal: bool = False
    partly: bool = False


def replica_counts(most: int, size: int) -> list[int]:
    """Numbers of replicas worth trying: small ones, powers of two and halves between, all devices, and the most that
    get equally many of `size` samples.
    """
    powers = [base << shift for base in (1, 3) for shift in range(most.bit_length())]
    even = next((count for count in range(most, 1, -1) if size % count == 0), 1)
    return sorted({count for count in [*powers, most, most - 1, even] if 1 <= count <= most})


def seeds(problem: Problem, cuts: Cuts, worth: Callable[[float], bool]) -> Iterator[Shape]:
    """A shape for every useful number of stages, while `worth` accepts the seconds of its slowest stage.

    If stages are to be equal, it is the one with as many stages as groups of devices.
    """
    table = _Table(problem, cuts)
    if cuts.equal:
        limit, ends = table.balanced()
        if ends and worth(limit):
            yield _shape(problem, cuts, ends, [cuts.width] * len(ends))
        return
    if not table.fits():
        return
    found: set[int] = set()
    refused = table.balance
    for limit in table.limits():
        if not worth(limit):
            return
        for num_stages, ends, replicas in table.solve(limit, found):
            found.add(num_stages)
            ends, replicas = table.tightened(refused, limit, num_stages) or (ends, replicas)
            yield _shape(problem, cuts, ends, replicas)
        if len(found) >= table.most_stages:
            return
        refused = limit


class _Table:
    """Prefix sums along the reversed order, one row per number of replicas."""

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem, self.cuts = problem, cuts
        self.reverse = np.array(list(reversed(cuts.order)))
        self.num_slots = (cuts.num_devices or problem.num_devices) // cuts.width
        most = max(1, int(min(self.num_slots, problem.max_replicas / cuts.width)))
        self.counts = [1] if cuts.equal else replica_counts(most, cuts.size // cuts.width)
        self.most_stages = min(self.num_slots, problem.num_units)
        self.seconds = [self._prefix(count * cuts.width) for count in self.counts]
        self.balance = self.seconds[0][-1] / self.num_slots
        self._room: dict[int, Positions] = {}
        slots = np.arange(self.num_slots + 1)[None, :] - np.array(self.counts)[:, None]
        self._before = np.where(slots < 0, self.num_slots + 1, slots)  # unreachable: behind all slots
        self._rows = np.arange(len(self.counts))[:, None]

    @cached_property
    def borders(self) -> Positions | None:
        """The last ends of connected stages; None if they need not be connected."""
        return _borders(self.problem, self.reverse) if self.cuts.apart else None

    def limits(self) -> Array:
        near, far = 3 * self.balance, max(float(row[-1]) for row in self.seconds)
        fine = np.geomspace(self.balance, near, FINE)
        return np.concatenate([fine, np.geomspace(near, max(near, far), COARSE + 1)[1:]])

    def _prefix(self, replicas: int) -> Array:
        """Prefix sums of seconds per micro-batch, with its share of the all-reduce."""
        problem, size = self.problem, self.cuts.size
        table = problem.seconds(-(-size // replicas), slowest_kind(problem))
        total = table.total + (table.forward if self.cuts.recompute else 0.0)
        number = -(-problem.batch_size // size)
        devices = range(replicas)
        summing = problem.cluster.all_reduce_seconds(devices, 1e9) / 1e9 if replicas > 1 else 0.0
        each = total + problem.parameter_bytes * summing / number
        return np.concatenate([[0.0], np.cumsum(each[self.reverse])])

    def _extensions(self, limit: float) -> Positions:
        """For every number of replicas and position, where a stage that begins there must end to keep the limit."""
        longest = limit * (1 + 1e-9)
        ends = np.stack([np.searchsorted(row, row + longest, side="right") - 1 for row in self.seconds])
        return ends if self.borders is None else np.minimum(ends, self.borders)

    def _fitting(self, num_following: int) -> Positions:
        """The same to fit the memory, with this many stages behind the new one."""
        key = 0 if self.cuts.recompute else num_following
        if key not in self._room:
            self._room[key] = np.stack([self._fitting_row(count * self.cuts.width, key) for count in self.counts])
        return self._room[key]

    def _fitting_row(self, replicas: int, num_following: int) -> Positions:
        problem = self.problem
        saved = problem.saved_bytes(-(-self.cuts.size // replicas))
        needed = (problem.static_bytes_of(replicas) + (num_following + 1) * saved)[self.reverse]
        total = np.concatenate([[0.0], np.cumsum(needed)])
        return np.searchsorted(total, total + float(problem.memory_bytes.min()), side="right") - 1

    def solve(
        self, limit: float, known: set[int], most_stages: int | None = None
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """Stages (from the sink) as ends and replicas, for every number of stages not yet known."""
        reach = np.full(self.num_slots + 1, -1, dtype=np.int64)
        reach[0] = 0
        choices: list[Positions] = []
        allowed = self._allowed(limit)
        for stage in range(most_stages or self.most_stages):
            reach, choice = self._step(reach, allowed(stage))
            choices.append(choice)
            if reach[-1] >= len(self.reverse) and stage + 1 not in known:
                yield stage + 1, *self._trace(choices, allowed)
            if reach.max() < 0:
                return

    def tightened(self, low: float, high: float, num_stages: int) -> tuple[list[int], list[int]] | None:
        """Ends and replicas of `num_stages` stages for the lowest limit found between `low` and `high`."""
        best = None
        known = set(range(1, self.most_stages + 1)) - {num_stages}
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            solved = next(((ends, replicas) for _, ends, replicas in self.solve(middle, known, num_stages)), None)
            best, low, high = (solved, low, middle) if solved else (best, middle, high)
        return best

    def fits(self) -> bool:
        """True if some stages on some devices fit the memory, however long they take."""
        allowed, reach = self._allowed(float(self.limits()[-1])), np.full(self.num_slots + 1, -1, dtype=np.int64)
        reach[0] = 0
        for stage in range(self.most_stages):
            reach, _ = self._step(reach, allowed(stage))
            if reach.max() >= len(self.reverse):
                return True
        return False

    def balanced(self) -> tuple[float, list[int]]:
        """The least limit with which a stage on every group of devices suffices, and their ends; none if none does."""
        low, high = self.balance, float(self.seconds[0][-1])
        best = self._equal(high)
        for _ in range(EQUAL_BISECTIONS if best else 0):
            middle = (low * high) ** 0.5
            ends = self._equal(middle)
            best, low, high = (ends, low, middle) if ends else (best, middle, high)
        return high, best

    def _equal(self, limit: float) -> list[int]:
        """The ends of stages on one group of devices each, which leave a unit for every stage that follows."""
        allowed, ends, most = self._allowed(limit), [0], len(self.reverse) - self.num_slots
        for stage in range(self.num_slots):
            ends.append(min(int(allowed(stage)[0, ends[-1]]), most + stage + 1))
            if ends[-1] == ends[-2]:
                return []
        return ends[1:] if ends[-1] == len(self.reverse) else []

    def _allowed(self, limit: float) -> Callable[[int], Positions]:
        """The ends of stages, as in `_extensions`, by the number of stages behind them."""
        if self.cuts.partly:
            return partial(self._recomputing, limit)
        extensions = self._extensions(limit)
        fitting = self._fitting if self.cuts.fitting else lambda _: extensions
        return lambda stage: np.minimum(extensions, fitting(stage))

    def _recomputing(self, limit: float, num_following: int) -> Positions:
        (row,) = self.seconds
        ends = furthest(row, self._memory.seconds(num_following + 1), row + limit * (1 + 1e-9))[None, :]
        return ends if self.borders is None else np.minimum(ends, self.borders)

    @cached_property
    def _memory(self) -> ScarceMemory:
        return ScarceMemory(self.problem, self.reverse, self.cuts.width, self.cuts.size)

    def _step(self, reach: Positions, extensions: Positions) -> tuple[Positions, Positions]:
        """Add a stage: for every number of slots, how far it reaches, and with how many replicas."""
        before = np.append(reach, -1)[self._before]
        ends = np.where(before >= 0, extensions[self._rows, np.maximum(before, 0)], -1)
        ends = np.where(ends > before, ends, -1)
        choice = ends.argmax(axis=0)
        return np.take_along_axis(ends, choice[None, :], axis=0)[0], choice

    def _trace(self, choices: list[Positions], allowed: Callable[[int], Positions]) -> tuple[list[int], list[int]]:
        """Ends and replicas of all stages, traced back through the choices."""
        slots, rows = self.num_slots, []
        for choice in reversed(choices):
            rows.append(int(choice[slots]))
            slots -= self.counts[rows[-1]]
        ends, position = [], 0
        for stage, row in enumerate(reversed(rows)):
            position = int(allowed(stage)[row, position])
            ends.append(position)
        return ends, [self.counts[row] * self.cuts.width for row in reversed(rows)]


def slowest_kind(problem: Problem) -> int:
    """The kind of device on which the model takes longest."""
    size = problem.sizes[-1]
    return max(range(len(problem.cluster.kinds)), key=lambda kind: float(problem.seconds(size, kind).total.sum()))


def _borders(problem: Problem, reverse: Positions) -> Positions:
    """For every position, the last end of a stage that begins there such that its units are connected."""
    num_units = len(reverse)
    neighbours = [{*problem.order.successors(unit), *problem.order.predecessors(unit)} for unit in map(int, reverse)]
    borders = np.full(num_units + 1, num_units, dtype=np.int64)
    for start in range(num_units):
        inside = {int(reverse[start])}
        for stop in range(start + 1, num_units):
            if inside.isdisjoint(neighbours[stop]):
                borders[start] = stop
                break
            inside.add(int(reverse[stop]))
    return borders


def _shape(problem: Problem, cuts: Cuts, ends: list[int], replicas: list[int]) -> Shape:
    """The shape of these stages, with that of the user's step last even if the order ends with another sink."""
    reverse, step = list(reversed(cuts.order)), problem.num_units - 1
    starts = [0, *ends[:-1]]
    groups = [tuple(sorted(reverse[start:stop])) for start, stop in zip(starts, ends, strict=True)]
    stages = sorted(zip(groups[::-1], replicas[::-1], strict=True), key=lambda stage: step in stage[0])
    return Shape(
        groups=tuple(group for group, _ in stages),
        replicas=tuple(count for _, count in stages),
        size=cuts.size,
        schedule=cuts.schedule,
    )


def furthest(row: Array, again: Array, latest: Array) -> Positions:
    """For every position, the last end of a stage that starts there such that its seconds are within its limit.

    Args:
        row: prefix sums of seconds of computing.
        again: see `ScarceMemory.seconds`.
        latest: the most seconds of `row` and `again` for each start.
    """
    within = np.triu(row[None, :] + again <= latest[:, None])
    found: Positions = within.shape[1] - 1 - within[:, ::-1].argmax(axis=1)
    return np.maximum(found, np.arange(len(row)) * within.any(axis=1))


class ScarceMemory:
    """Prefix sums of the bytes and seconds that decide what parts of an order recompute.

    The blocks of a part are taken to save equally many bytes per second; searches choose among them later.

    Args:
        problem: the problem.
        order: all units.
        replicas: of every stage.
        size: samples of a micro-batch, which the replicas share.
    """

    def __init__(self, problem: Problem, order: Positions, replicas: int, size: int) -> None:
        share = -(-size // replicas)
        figures, freed, seconds = problem.block_figures(share), *np.zeros((2, problem.num_units))
        for number, units in enumerate(problem.units_of_blocks):
            for unit in units:
                freed[unit] += figures.freed[number] / len(units)
                seconds[unit] += figures.seconds[number] / len(units)
        columns = (problem.saved_bytes(share), problem.static_bytes_of(replicas), freed, seconds)
        self._sums = [np.concatenate([[0.0], np.cumsum(column[order])]) for column in columns]
        self._room = float(problem.memory_bytes.min())
        self._largest = float(figures.saved.max(initial=0.0))

    def seconds(self, in_flight: int) -> Array:
        """Seconds per micro-batch by the positions at which a stage starts and stops; infinite if nothing helps."""
        saved, static, freed, seconds = (column[None, :] - column[:, None] for column in self._sums)
        lacking = static + in_flight * saved - self._room
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (lacking + self._largest) / (in_flight * freed)
            again: Array = np.where(lacking <= 0, 0.0, np.where(share <= 1, share * seconds, np.inf))
        return again


MAX_SLOTS = 64
"""Beyond this number, devices are assigned in groups of equal size."""
