"""A lower bound where devices may share the work inside stages, in groups of several sizes (tensor parallelism).

Group work can at most be as good as that of the size with which a unit takes the fewest device-seconds, and all devices
can at most be busy all the time. Waiting, the longest unit, and memory are not part of it: another group would change
them.
"""

from __future__ import annotations

import numpy as np

from lightning_gpp.planning.problem.problem import Array, Problem


def members_bound(problem: Problem) -> float:
    """Seconds of a step with all devices busy and every unit in groups of its best size."""
    return min(problem.batch_size / size * _device_seconds(problem, size) for size in problem.sizes)


def _device_seconds(problem: Problem, size: int) -> float:
    """Least seconds of a micro-batch on all devices together; replicas that share it take no less in total."""
    columns = [number * _fastest(problem.of_members(number), size) for number in problem.members]
    return float(np.min(columns, axis=0).sum()) / problem.num_devices


def _fastest(problem: Problem, size: int) -> Array:
    kinds = range(len(problem.cluster.kinds))
    seconds: Array = np.min([problem.seconds(size, kind).total for kind in kinds], axis=0)
    return seconds
