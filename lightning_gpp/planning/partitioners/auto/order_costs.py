"""Seconds of stages that are parts of an order beside their own: of messages where links do not overlap, and of
recomputing as much as makes a stage fit where memory is scarce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array, Problem


def message_seconds(problem: Problem, order: NDArray[np.int64], num_samples: int) -> Array:
    """Seconds per micro-batch by the positions in the order at which a stage starts and stops, over the slowest link.

    Args:
        problem: the problem.
        order: all units.
        num_samples: samples of a micro-batch that a replica of the stage gets.
    """
    sent = _bytes_between(problem, order, num_samples)
    touching = np.concatenate([[0.0], np.cumsum(sent.sum(axis=0) + sent.sum(axis=1))])
    corner = np.pad(sent.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    same = np.diagonal(corner)
    inside = same[None, :] - corner - corner.T + same[:, None]
    crossing: Array = touching[None, :] - touching[:, None] - 2 * inside
    return np.triu(crossing) * problem.cluster.busy_seconds_per_byte


def _bytes_between(problem: Problem, order: NDArray[np.int64], num_samples: int) -> Array:
    """Bytes that the first of two units sends to the second and gets back, by their positions in the order."""
    position = np.argsort(order)
    sent = np.zeros((len(order), len(order)))
    for value in problem.units.values:
        for dst in value.dsts:
            sent[position[value.src], position[dst]] += value.bytes.at(num_samples) * value.num_directions
    return sent


def furthest(row: Array, messages: Array, latest: Array) -> NDArray[np.int64]:
    """For every position, the last end of a stage that starts there such that its seconds are within its limit.

    Args:
        row: prefix sums of seconds of computing.
        messages: see `message_seconds`.
        latest: the most seconds of `row` and `messages` for each start.
    """
    within = np.triu(row[None, :] + messages <= latest[:, None])
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
