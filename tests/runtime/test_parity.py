"""Whatever the plan, real processes compute the loss and the gradients of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import in_flight
from tests.runtime.cases import Case, run_case, run_cases
from tests.strategies import plan_of, towers

TWO_TOWERS = [(0, 2), (1, 2)]
DIAMOND = [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]


def _plan(pairs: list[tuple[int, int]], sizes: list[int], **options: object) -> Plan:
    return plan_of(pairs, sizes, 8, data=True, **options)  # type: ignore[arg-type]


def with_slack(plan: Plan, slack: list[int]) -> Plan:
    stages = zip(plan.stages, slack, strict=True)
    return replace(plan, stages=tuple(replace(stage, slack=count) for stage, count in stages))


CASES = {
    "two towers": Case(_plan(TWO_TOWERS, [2, 2, 2]), 8),
    "two towers, gpipe": Case(_plan(TWO_TOWERS, [2, 2, 2], schedule="gpipe"), 8),
    "diamond with a skip edge": Case(_plan(DIAMOND, [2] * 4), 8),
    "unequal micro-batches": Case(_plan(DIAMOND, [4, 1, 2, 3]), 8),
    "uneven last micro-batch": Case(_plan(DIAMOND, [3, 3, 2, 3]), 7),
    "replicas of a stage": Case(_plan(TWO_TOWERS, [4, 4, 4], devices=[(2, 3), (1,), (0,)]), 8),
    "replicas, some without samples": Case(_plan(TWO_TOWERS, [3, 1, 2], devices=[(2, 3), (1,), (0,)]), 7),
    "replicas of the step": Case(_plan(TWO_TOWERS, [4, 4, 4], devices=[(2,), (2,), (0, 1)]), 8),
    "several stages on a device": Case(_plan(DIAMOND, [2] * 4, devices=[(0,), (1,), (1,), (0,)]), 8),
    "slack": Case(with_slack(_plan(DIAMOND, [2] * 4), [2, 0, 1, 0]), 12),
    "one device": Case(_plan(DIAMOND, [2, 1, 3, 2], devices=[(0,)] * 4), 8),
    "two pipeline replicas": Case(_plan(TWO_TOWERS, [2, 2, 2], devices=[(1,), (1,), (0,)]), 8, num_pipelines=2),
    "tied weights": Case(_plan(TWO_TOWERS, [2, 2, 2]), 8, tied=True),
    "tied, both replicated": Case(_plan([(0, 1)], [4, 2], devices=[(0, 1), (0,)]), 8, num_pipelines=2, tied=True),
    "chain of the same stages": Case(_plan(DIAMOND, [2, 1, 2, 2]).chained(), 8),
    "second run": Case(_plan(TWO_TOWERS, [2, 2, 2]), 8, num_runs=2),
}


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_equals_one_process(num_processes: int) -> None:
    run_cases([case for case in CASES.values() if case.num_processes == num_processes])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_activations_in_flight_are_what_the_schedule_promises(schedule: str) -> None:
    """By what autograd keeps alive: depth, not the number of stages."""
    plan = towers(2, 2, batch_size=8, schedule=schedule)
    outcomes = run_case(Case(plan, 8))
    promised = in_flight(plan, 8)
    alive = {stage: peak for outcome in outcomes for stage, peak in outcome.peak_alive.items()}
    assert alive == promised
    if schedule == "1f1b":
        assert promised == {0: 3, 1: 2, 2: 3, 3: 2, 4: 1}
