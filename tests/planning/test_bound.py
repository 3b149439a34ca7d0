"""The lower bound: devices that are busy all the time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_gpp.cluster import Cluster
from lightning_gpp.planning import Problem, Request, best_plan
from lightning_gpp.planning.problem.problem import busy_bound
from tests.planning import graphs
from tests.planning.brute_force import best_of_all
from tests.planning.problems import DEVICE, random_problem


def _mixed(problem: Problem, seed: int) -> Problem:
    """Every device its own kind, up to 8 times slower than the first."""
    random = Random(seed)
    devices = tuple(
        replace(device, name=f"kind {index}", peak_flops={"float32": 1e9 / random.choice((1, 2, 8))})
        for index, device in enumerate(problem.cluster.devices)
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices), recompute=False)


def test_no_plan_beats_the_bound() -> None:
    for seed in range(8):
        problem = _mixed(random_problem(seed, num_units=2 + seed % 3, num_devices=2 + seed % 2), seed)
        best = best_of_all(problem)
        assert 0 < busy_bound(problem) <= best.seconds * (1 + 1e-9), seed


def test_glue_that_units_repeat_counts_once() -> None:
    """One device runs the mask of this model once, although every unit that reads it has a copy."""
    request = Request(cluster=Cluster.uniform(DEVICE, 1), batch_size=8, seconds=1.0)
    plan = best_plan("auto", graphs.gpt(), request)
    assert plan.lower_bound == pytest.approx(plan.seconds, rel=1e-3)
    assert plan.lower_bound <= plan.seconds * (1 + 1e-9)
