"""The least costs of units on numbers of replicas, for lower bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from lightning_gpp.plan_parts import even_parts
from lightning_gpp.planning.problem.problem import Array, Problem


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """Least costs of all units for any number of replicas from `fewest` to `most`."""

    fewest: int
    most: int
    forward: Array
    """Seconds of a forward of a full micro-batch on one replica."""

    busy: Array
    """Seconds of forward and backward, on average over all micro-batches."""

    summing: Array
    """Device-seconds of reducing the gradients."""


def range_costs(problem: Problem, size: int, fewest: int, most: int) -> ReplicaRange:
    forward, backward = fastest(problem, least_share(problem, size, most))
    sizes = Counter(stop - start for start, stop in even_parts(problem.batch_size, size))
    shares = ((number, least_share(problem, samples, most)) for samples, number in sizes.items())
    seconds: Array = np.sum([number * np.add(*fastest(problem, share)) for number, share in shares], axis=0)
    busy = seconds * size / problem.batch_size
    summing = 2 * (fewest - 1) * problem.parameter_bytes / best_bandwidth(problem, fewest)
    return ReplicaRange(fewest, most, forward, busy, summing)


def least_share(problem: Problem, size: int, replicas: int) -> int:
    """Samples of a micro-batch: of the last replica's share if devices are equally fast, otherwise of the smallest."""
    return -(-size // replicas) if equally_fast(problem, size) else max(1, size // replicas)


def equally_fast(problem: Problem, size: int) -> bool:
    first, *others = (problem.seconds(size, kind).total for kind in range(len(problem.cluster.kinds)))
    return all(np.array_equal(first, other) for other in others)


def best_bandwidth(problem: Problem, replicas: int) -> float:
    """Bandwidth of the slowest link that any choice of this number of devices has to use."""
    single = [link.bytes_per_second for link in problem.cluster.links.values()]
    for level in problem.cluster.levels:
        if max(Counter(level.groups).values()) >= replicas:
            return max([level.link.bytes_per_second, *single])
    return max([level.link.bytes_per_second for level in problem.cluster.levels] + single)


def fastest(problem: Problem, size: int) -> tuple[Array, Array]:
    """Forward and backward seconds of all units on their fastest kind of device."""
    tables = [problem.seconds(size, kind) for kind in range(len(problem.cluster.kinds))]
    forward = np.min([table.forward for table in tables], axis=0)
    total = np.min([table.total for table in tables], axis=0)
    return np.minimum(forward, total), total - np.minimum(forward, total)
