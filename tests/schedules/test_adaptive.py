"""List scheduling with the plan's own times."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan
from lightning_gpp.planning.assignment.estimate import timed
from lightning_gpp.schedules import compile_program, schedule_names
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.strategies import chain, plan_of, towers


def _simulated(plan: Plan, costs: StageCosts) -> Timeline:
    return simulate(compile_program(plan), costs)


def test_it_is_as_drawn() -> None:
    plan = plan_of([(0, 2), (1, 2)], (1, 1, 1), 4, schedule="adaptive")
    stages = tuple(
        Figures(forward_seconds=Affine(0, forward), input_seconds=Affine(0, 1), weight_seconds=Affine(0, 1))
        for forward in (1, 2, 1)
    )
    costs = StageCosts(stages=stages)
    timeline = _simulated(timed(plan, costs), costs)
    starts = {str(span.action): span.start for spans in timeline.devices for span in spans}
    assert [starts[f"2I{number}"] for number in range(4)] == [3, 6, 9, 13]
    assert timeline.makespan == 16


def test_it_keeps_to_the_memory() -> None:
    plan = replace(chain((1,) * 4, 12), schedule="adaptive")
    costs = StageCosts.uniform(plan, 1, 2, 1)
    tight = timed(plan, replace(costs, parameter_copies=0), (2.0,) * 4)
    timeline = _simulated(replace(tight, stages=_bytes(tight)), costs)
    assert max(timeline.peak_in_flight.values()) == 2
    assert timeline.makespan > _simulated(plan, costs).makespan


def _bytes(plan: Plan) -> tuple[object, ...]:
    figures = [
        replace(stage.figures, activation_bytes=Affine(0, 1), pending_bytes=Affine(0, 1)) for stage in plan.stages
    ]
    return tuple(replace(stage, figures=entry) for stage, entry in zip(plan.stages, figures, strict=True))


def test_towers_of_unequal_stages_beat_every_other_schedule() -> None:
    plan = towers(3, 2, 12)
    seconds = [(1, 3), (2, 2), (1, 1), (3, 4), (1, 2), (1, 1), (2, 6)]
    times = ((Affine(0, f), Affine(0, b / 2)) for f, b in seconds)
    stages = tuple(Figures(forward_seconds=f, input_seconds=half, weight_seconds=half) for f, half in times)
    costs = StageCosts(stages=stages)
    known = timed(plan, costs)
    steps = {
        name: _simulated(replace(known, schedule=name), costs).makespan
        for name in schedule_names()
        if method_of(name).stages_per_device == 1 and not method_of(name).bidirectional and "test" not in name
    }
    assert steps["adaptive"] == min(steps.values())
    assert steps["adaptive"] < steps["1f1b"]
