"""Seconds that messages take from the computing of stages that are parts of an order, where links do not overlap."""

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
