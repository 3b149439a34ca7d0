"""Common parts of partitioners for chains of stages: their view of the problem, and the choice of a draft.

They are published for one profile per layer and one kind of device; on a mixed cluster they assume the slowest kind and
the smallest memory for all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import inf

import networkx as nx
import numpy as np

from lightning_gpp.planning.problem.draft import Draft, DraftStage, unreplicated
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.partitioner import Answer
from lightning_gpp.planning.problem.problem import Array, Problem

NUM_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class ChainCandidate:
    """A draft, and the value of the search's objective for it: seconds per sample of the slowest stage."""

    objective: float
    draft: Draft


def slowest_seconds(problem: Problem, num_samples: int) -> tuple[Array, Array]:
    """Seconds of every unit on the slowest kind of device: of a forward, and of a forward and its backward together."""
    kinds = [problem.seconds(num_samples, kind) for kind in range(len(problem.cluster.kinds))]
    return reduce(np.maximum, [kind.forward for kind in kinds]), reduce(np.maximum, [kind.total for kind in kinds])


def precedence(problem: Problem) -> nx.DiGraph:
    """The graph of units, with edges to the last one, the user's step, from all others without successors."""
    order = problem.order.copy()
    last = problem.num_units - 1
    order.add_edges_from((unit, last) for unit in range(last) if not order.out_degree(unit))
    return order


def gradient_seconds(num_replicas: int, num_bytes: Array, bytes_per_second: float) -> Array:
    """Seconds of a ring all-reduce over the replicas of a stage: every device sends 2(n - 1)/n of the bytes."""
    return 2 * (num_replicas - 1) / num_replicas * num_bytes / bytes_per_second


def slowest_link(problem: Problem) -> float:
    """Bytes per second of the slowest link between any two devices."""
    cluster = problem.cluster
    pairs = ((src, dst) for src, dst in product(range(cluster.num_devices), repeat=2) if src != dst)
    return min((cluster.link(*pair).bytes_per_second for pair in pairs), default=inf)


def chained(problem: Problem, stages: Sequence[DraftStage]) -> Draft | None:
    """The stages as a chain; None if that would be pipeline replicas and the problem allows none."""
    draft = Draft(stages=tuple(stages), schedule=problem.schedules[0], chained=True)
    return draft if problem.replicable or unreplicated(problem, draft)[1] == 1 else None


def choose(problem: Problem, candidates: Sequence[ChainCandidate], states: int) -> Answer:
    """The answer with the candidate whose simulated step is the shortest among those that fit."""
    evaluate = Evaluator(problem)
    judged = sorted(((evaluate(candidate.draft), candidate) for candidate in candidates), key=lambda pair: pair[0].rank)
    if not judged or not judged[0][0].fits:
        reason = "No chain of stages uses all devices within their memory and the limits on replicas."
        if judged and judged[0][0].seconds < inf:
            lack = judged[0][0].excess_bytes / 2**30
            reason = f"The most frugal plan found does not fit: a device lacks {lack:.2f} GiB of memory."
        return Answer(draft=None, states=states, notes=(reason,))
    (_, chosen), *others = [(found, candidate) for found, candidate in judged if found.fits]
    return Answer(
        draft=chosen.draft,
        objective=chosen.objective,
        states=states,
        alternatives=tuple(candidate.draft for _, candidate in others[:NUM_ALTERNATIVES]),
    )
