"""Where the pipeline does not flush, partitioners minimise the period, and count the weights that stages keep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isinf

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.errors import ScheduleError
from lightning_gpp.planning import Request, best_plan, estimate, manual
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.reports import period_text
from lightning_gpp.runtime.weights import copies_of
from lightning_gpp.simulation import StageCosts, simulate_period
from tests.planning import graphs
from tests.planning.drafts import random_case
from tests.planning.problems import DEVICE
from tests.strategies import plan_of


@pytest.mark.parametrize("policy", ["stash", "double_buffer", "latest", "corrected"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_drafts_take_the_memory_of_their_program(policy: str, number: int) -> None:
    for seed in range(4):
        problem, draft = random_case(graphs.two_towers(), seed, replicated=False)
        draft = replace(draft, stages=tuple(replace(stage, slack=0) for stage in draft.stages))  # is for a flush
        size = 48 // number
        draft = replace(draft, schedule="1f1b", stages=tuple(replace(s, micro_batch_size=size) for s in draft.stages))
        problem = replace(problem, sizes=(size,), weight_copies=lambda delay: copies_of(policy, delay))
        if isinf(Evaluator(problem)(draft).seconds):  # further ahead than the policy allows
            with pytest.raises(ScheduleError, match=r"keeps two versions.*strategy.weights=stash"):
                simulated(problem, draft)
            continue
        program = simulated(problem, draft).peak_bytes
        expected = [program[stage.devices[0]] for stage in draft.stages]
        assert Evaluator(problem)(draft).peak_bytes == pytest.approx(expected, rel=1e-6), (seed, str(draft))


@pytest.mark.parametrize("num_devices", [3, 4])
def test_plans_for_double_buffering_are_at_most_one_update_late(num_devices: int) -> None:
    cluster = Cluster.uniform(DEVICE, num_devices, Link())
    request = Request(
        cluster=cluster,
        batch_size=32,
        max_replicas=1,
        idle_devices=False,
        num_pipelines=1,
        seconds=1.0,
        weight_copies=partial(copies_of, "double_buffer"),
    )
    found = best_plan("auto", graphs.chain(), request)
    assert found.period is not None
    assert found.plan.num_devices == num_devices
    assert max(found.period.delays.values()) == 1


@pytest.mark.parametrize("number", [1, 2, 4])
def test_devices_that_share_weights_wait_for_each_other_before_every_update(number: int) -> None:
    """The last stage cannot begin before the first one has ended: after its own work, and three backwards to it."""
    plan = plan_of([(0, 1), (1, 2), (2, 3)], [1] * 4, number, data=True)
    costs = StageCosts.uniform(plan)
    alone, tied = simulate_period(plan, costs), simulate_period(plan, replace(costs, tied=((0, 3),)))
    assert (alone.seconds, alone.untied, alone.tied) == (2 * number, 2 * number, ())
    assert (tied.seconds, tied.untied) == (2 * number + 3, 2 * number)
    assert "'stage0', 'stage3' share weights" in period_text(plan, tied)
    assert "share weights" not in period_text(plan, alone)


def test_stages_that_share_weights_are_known_from_the_graph() -> None:
    graph = graphs.gpt(2)
    spec = {"transformer.wte": 0, "transformer.drop": 0, "transformer.h.0": 1, "transformer.h.1": 2, "lm_head": 3}
    plan = manual(graph, spec, schedule="1f1b", batch_size=4, num_micro_batches=2)
    cluster = Cluster.uniform(DEVICE, 4, Link())
    assert estimate(graph, plan, cluster).tied == ((0, 3),)
    together = replace(plan, stages=tuple(replace(stage, devices=(0,)) for stage in plan.stages))
    assert estimate(graph, together, cluster).tied == ()
