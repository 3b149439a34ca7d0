"""List scheduling with the plan's own times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.planning.timed import timed
from lightning_gpp.schedules import compile_program, schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import StageCost, StageCosts, Timeline, simulate
from tests.strategies import chain, plans, towers

SECONDS = st.tuples(st.integers(1, 5), st.integers(1, 9))


def _simulated(plan: Plan, costs: StageCosts) -> Timeline:
    return simulate(compile_program(plan), costs)


@pytest.mark.parametrize(("num_stages", "number"), [(2, 4), (4, 12), (8, 24)])
def test_chains_reach_the_least_possible_time_with_the_memory_of_1f1b(num_stages: int, number: int) -> None:
    """With F = I = W = 1 the last device cannot start before `num_stages` - 1, and has three units per micro-batch."""
    plan = replace(chain((1,) * num_stages, number), schedule="adaptive")
    costs = StageCosts.uniform(plan, 1, 2, 1)
    timeline = _simulated(plan, costs)
    assert timeline.makespan == num_stages - 1 + 3 * number
    assert max(timeline.peak_in_flight.values()) == num_stages


def test_it_keeps_to_the_memory() -> None:
    plan = replace(chain((1,) * 4, 12), schedule="adaptive")
    costs = StageCosts.uniform(plan, 1, 2, 1)
    tight = timed(plan, replace(costs, parameter_copies=0), (2.0,) * 4)
    timeline = _simulated(replace(tight, stages=_bytes(tight)), costs)
    assert max(timeline.peak_in_flight.values()) == 2
    assert timeline.makespan > _simulated(plan, costs).makespan


def _bytes(plan: Plan) -> tuple[object, ...]:
    figures = [replace(stage.figures, activation_bytes=Affine(0, 1)) for stage in plan.stages]
    return tuple(replace(stage, figures=entry) for stage, entry in zip(plan.stages, figures, strict=True))


def test_towers_of_unequal_stages_beat_every_other_schedule() -> None:
    plan = towers(3, 2, 12)
    seconds = [(1, 3), (2, 2), (1, 1), (3, 4), (1, 2), (1, 1), (2, 6)]
    stages = tuple(StageCost(forward=Affine(0, f), backward=Affine(0, b), weight=Affine(0, b / 2)) for f, b in seconds)
    costs = StageCosts(stages=stages)
    known = timed(plan, costs)
    steps = {
        name: _simulated(replace(known, schedule=name), costs).makespan
        for name in schedule_names()
        if method_of(name).stages_per_device == 1 and not method_of(name).bidirectional and "test" not in name
    }
    assert steps["adaptive"] == min(steps.values())
    assert steps["adaptive"] < steps["1f1b"]


@settings(max_examples=40, deadline=None)
@given(
    plan=plans(schedules=("adaptive",)),
    seconds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=7, max_size=7),
)
def test_any_plan(plan: Plan, seconds: list[tuple[int, int]]) -> None:
    stages = tuple(
        StageCost(forward=Affine(0, f), backward=Affine(0, f + b), weight=Affine(0, b))
        for f, b in seconds[: len(plan.stages)]
    )
    costs = StageCosts(stages=stages)
    known = timed(plan, costs)
    timeline = _simulated(known, costs)
    assert timeline.makespan > 0
    again = _simulated(known, costs)
    assert again == timeline
