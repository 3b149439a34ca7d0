"""Partitioners minimise the period where the pipeline does not flush."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.evaluate import Evaluator
from tests.planning.problems import DEVICE, random_problem


@pytest.mark.parametrize("seed", range(6))
def test_a_period_is_the_time_of_the_busiest_stage(seed: int) -> None:
    problem = replace(random_problem(seed, num_units=4, num_devices=2), sizes=(1,), recompute=False)
    problem = replace(problem, cluster=Cluster.uniform(DEVICE, 2, Link()), continuous=True)
    draft = Draft(
        stages=tuple(
            DraftStage(units=units, devices=(d,), micro_batch_size=1) for units, d in (((0, 1), 1), ((2, 3), 0))
        )
    )
    total = problem.seconds(1).total
    busiest = problem.batch_size * max(total[[0, 1]].sum(), total[[2, 3]].sum())
    assert Evaluator(problem)(draft).seconds == pytest.approx(busiest)
    assert Evaluator(replace(problem, continuous=False))(draft).seconds > busiest
