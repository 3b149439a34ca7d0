"""Seconds of recomputing as much as makes a stage fit where memory is scarce, for the parts of an order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array, Problem


def furthest(row: Array, again: Array, latest: Array) -> NDArray[np.int64]:
    """For every position, the last end of a stage that starts there such that its seconds are within its limit.

    Args:
        row: prefix sums of seconds of computing.
        again: see `ScarceMemory.seconds`.
        latest: the most seconds of `row` and `again` for each start.
    """
    within = np.triu(row[None, :] + again <= latest[:, None])
    found: NDArray[np.int64] = within.shape[1] - 1 - within[:, ::-1].argmax(axis=1)
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

    def __init__(self, problem: Problem, order: NDArray[np.int64], replicas: int, size: int) -> None:
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
