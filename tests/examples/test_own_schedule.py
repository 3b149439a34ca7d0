"""The example of a schedule of one's own does what its picture says, and any plan can have it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

import gpp_examples.own_schedule  # noqa: F401  registers the schedule
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import compile_program, make_schedule
from lightning_gpp.simulation import StageCosts, simulate
from tests.strategies import chain, plans


def test_it_is_as_drawn() -> None:
    plan = chain((1, 1), 3, "last_first")
    assert str(make_schedule(plan)).splitlines() == [
        "0: 1F0 1F1 1F2 1B2 1B1 1B0",
        "1: 0F0 0F1 0F2 0B2 0B1 0B0",
    ]
    assert simulate(compile_program(plan), StageCosts.uniform(plan)).makespan == 8


@settings(max_examples=30, deadline=None)
@given(plan=plans())
def test_any_plan(plan: Plan) -> None:
    plan = replace(plan, schedule="last_first")
    simulate(compile_program(plan), StageCosts.uniform(plan))
