"""A lower bound on the step of every plan: devices can at most be busy all the time.

Every unit counts on the kind of device, and with the number of members, that take the fewest device-seconds for it.
Waiting, messages and memory are not part of the bound, so it holds under any schedule.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_gpp.planning.problem.problem import Array, Problem


def busy_bound(problem: Problem) -> float:
    """Seconds of a step with all devices busy: no schedule beats it, with any number of stages per device."""
    problem = replace(problem, repeats=False)
    return min(_bound_of_size(problem, size) for size in _largest_parts(problem))


def _largest_parts(problem: Problem) -> list[int]:
    """The samples of the largest micro-batch that each size gives, where it does not divide the mini-batch."""
    return sorted({-(-problem.batch_size // -(-problem.batch_size // size)) for size in problem.sizes})


def _bound_of_size(problem: Problem, size: int) -> float:
    columns = [number * _fastest(problem.of_members(number), size) for number in problem.members]
    least: Array = np.min(columns, axis=0)  # replicas that share a micro-batch take no less in total
    return problem.batch_size / size * float(least.sum()) / _num_fastest(problem, size)


def _fastest(problem: Problem, size: int) -> Array:
    """Seconds of every unit on its fastest kind of device."""
    seconds: Array = np.min(_by_kind(problem, size), axis=0)
    return seconds


def _num_fastest(problem: Problem, size: int) -> float:
    """The most devices of which each is the fastest for every unit that the cluster is worth."""
    if len(problem.members) > 1:
        return problem.num_devices
    fastest = np.maximum(_fastest(problem, size), 1e-30)
    slowdowns = [max(1.0, float(np.min(seconds / fastest))) for seconds in _by_kind(problem, size)]
    return sum(1 / slowdowns[problem.cluster.kind(device)] for device in range(problem.num_devices))


def _by_kind(problem: Problem, size: int) -> list[Array]:
    return [problem.seconds(size, kind).total for kind in range(len(problem.cluster.kinds))]
