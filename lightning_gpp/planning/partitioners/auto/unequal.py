"""First drafts whose stages have different numbers of replicas.

For one order, one micro-batch size and one limit on a stage's seconds, a dynamic program finds for every number of
stages s and devices k the longest suffix of the order that s stages on k devices can run within the limit:

    reach[s][k] = max over r of extend_r(reach[s - 1][k - r])

where extend_r(i) is the position at which a stage with r replicas that begins at i (counted from the sink) must end.
The limit rises in small steps from perfect balance; for every number of stages the first limit that suffices gives a
draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from lightning_gpp.planning.partitioners.auto.seeds import Cuts, Positions, Table, draft_of
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.problem import Array, Problem

FINE, COARSE = 40, 10
"""Numbers of limits on a stage's seconds to try: up to three times perfect balance, and from there to all work."""
TIGHTENED = 4
"""Bisections between the last two limits."""


def unequal(problem: Problem, cuts: Cuts, worth: Callable[[float], bool]) -> Iterator[Draft]:
    """A draft on all devices for every number of stages, while `worth` accepts the seconds of its slowest stage."""
    program, found, refused = _Program(problem, cuts), set[int](), 0.0
    for limit in program.limits():
        if not worth(limit):
            return
        for ends, replicas in program.solve(limit, found):
            found.add(len(ends))
            yield draft_of(problem, cuts, *(program.tightened(refused, limit, len(ends)) or (ends, replicas)))
        if len(found) >= program.most_stages:
            return
        refused = limit


def replica_counts(most: int, size: int) -> list[int]:
    """Numbers of replicas worth trying: small ones, powers of two and halves between, all devices, and the most that
    get equally many of `size` samples.
    """
    powers = [base << shift for base in (1, 3) for shift in range(most.bit_length())]
    even = next((count for count in range(most, 1, -1) if size % count == 0), 1)
    return sorted({count for count in [*powers, most, most - 1, even] if 1 <= count <= most})


class _Program:
    """The dynamic program for one order and one micro-batch size."""

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self._slots, most = problem.num_devices, min(problem.num_devices, problem.max_replicas, cuts.size)
        self.most_stages = min(self._slots, problem.num_units)
        self._counts = replica_counts(int(most), cuts.size)
        self._tables = [Table(problem, replace(cuts, width=count)) for count in self._counts]
        self._end = problem.num_units
        slots = np.arange(self._slots + 1)[None, :] - np.array(self._counts)[:, None]
        self._before = np.where(slots < 0, self._slots + 1, slots)  # unreachable: behind all slots

    def limits(self) -> Array:
        """Limits on the seconds of a stage, the least first."""
        balance, far = self._tables[0].seconds[-1] / self._slots, max(float(t.seconds[-1]) for t in self._tables)
        near = 3 * balance
        return np.concatenate([np.geomspace(balance, near, FINE), np.geomspace(near, max(near, far), COARSE + 1)[1:]])

    def solve(self, limit: float, known: set[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Ends and replicas of the stages (from the sink), for every number of stages not yet known."""
        reach, steps = np.full(self._slots + 1, -1, dtype=np.int64), list[tuple[Positions, Positions]]()
        reach[0] = 0
        for stage in range(self.most_stages):
            allowed = np.stack([table.allowed(limit, stage) for table in self._tables])
            reach, choice = self._step(reach, allowed)
            steps.append((choice, allowed))
            if reach[-1] >= self._end and stage + 1 not in known:
                yield self._trace(steps)
            if reach.max() < 0:
                return

    def tightened(self, low: float, high: float, num_stages: int) -> tuple[list[int], list[int]] | None:
        """Ends and replicas of so many stages for the lowest limit found between two."""
        best, others = None, set(range(1, self.most_stages + 1)) - {num_stages}
        for _ in range(TIGHTENED if low else 0):
            middle = (low * high) ** 0.5
            solved = next(self.solve(middle, others), None)
            best, low, high = (solved, low, middle) if solved else (best, middle, high)
        return best

    def _step(self, reach: Positions, allowed: Positions) -> tuple[Positions, Positions]:
        """Add a stage: for every number of devices, how far it reaches, and with how many replicas."""
        before = np.append(reach, -1)[self._before]
        rows = np.arange(len(self._counts))[:, None]
        ends = np.where(before >= 0, allowed[rows, np.maximum(before, 0)], -1)
        ends = np.where(ends > before, ends, -1)
        choice = ends.argmax(axis=0)
        return np.take_along_axis(ends, choice[None, :], axis=0)[0], choice

    def _trace(self, steps: list[tuple[Positions, Positions]]) -> tuple[list[int], list[int]]:
        """Ends and replicas of all stages, traced back through the choices."""
        slots, rows = self._slots, list[int]()
        for choice, _ in reversed(steps):
            rows.append(int(choice[slots]))
            slots -= self._counts[rows[-1]]
        ends, position = list[int](), 0
        for row, (_, allowed) in zip(reversed(rows), steps, strict=True):
            position = int(allowed[row, position])
            ends.append(position)
        return ends, [self._counts[row] for row in reversed(rows)]
