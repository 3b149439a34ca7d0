"""A lower bound on the step of every plan: devices can at most be busy all the time.

Every unit counts on the kind of device that is fastest for it. Waiting, messages and memory are not part of the bound,
so it holds under any schedule.
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
    seconds = [problem.seconds(size, kind).total for kind in range(len(problem.cluster.kinds))]
    fastest: Array = np.min(seconds, axis=0)  # replicas that share a micro-batch take no less in total
    slowdowns = [max(1.0, float(np.min(entry / np.maximum(fastest, 1e-30)))) for entry in seconds]
    num_fastest = sum(1 / slowdowns[problem.cluster.kind(device)] for device in range(problem.num_devices))
    return problem.batch_size / size * float(fastest.sum()) / num_fastest
