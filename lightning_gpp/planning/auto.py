"""The default partitioner."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np

from lightning_gpp.planning.answer import Answer, Control
from lightning_gpp.planning.draft import Draft, DraftStage
from lightning_gpp.planning.evaluate import Evaluator
from lightning_gpp.planning.problem import Problem
from lightning_gpp.planning.registry import register
from lightning_gpp.planning.topology import layouts


@register("auto")
def auto(problem: Problem, control: Control) -> Answer:
    """Interim: contiguous cuts of the recorded order."""
    evaluate = Evaluator(problem)
    best, best_rank = None, (inf, inf)
    n, k = problem.num_units, problem.num_devices
    for size in problem.sizes:
        total = problem.seconds(size).total
        for stages in range(1, min(n, k) + 1):
            if problem.max_replicas == 1 and stages < k:
                continue
            bounds = np.searchsorted(np.cumsum(total), total.sum() * np.arange(1, stages) / stages) + 1
            bounds = np.minimum(np.maximum(bounds, np.arange(1, stages)), n - stages + np.arange(1, stages))
            cuts = [0, *bounds.tolist(), n]
            if sorted(set(cuts)) != cuts:
                continue
            replicas = [k // stages + (i < k % stages) for i in range(stages)]
            for layout in layouts(replicas):
                draft = Draft(
                    stages=tuple(
                        DraftStage(units=tuple(range(a, b)), devices=d, micro_batch_size=size)
                        for (a, b), d in zip(pairwise(cuts), layout, strict=True)
                    ),
                    schedule=problem.schedules[0],
                )
                rank = evaluate(draft).rank
                if rank < best_rank:
                    best, best_rank = draft, rank
    return Answer(draft=best, objective=best_rank[1], objective_name="seconds of a step", states=evaluate.evaluations)
