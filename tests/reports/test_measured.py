"""Simulated timelines against measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.reports import compare_timelines, comparison_text
from lightning_gpp.schedules import Action, Kind, compile_program
from lightning_gpp.simulation import Collective, Span, StageCosts, Timeline, simulate
from tests.strategies import chain


def timeline_of(plan: Plan, forward: float, backward: float) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, forward, backward))


PLAN = chain([1, 1, 1], 4)
SIMULATED = timeline_of(PLAN, 1, 2)


def test_means_of_every_kind_and_stage() -> None:
    comparison = compare_timelines(SIMULATED, [timeline_of(PLAN, 2, 2), timeline_of(PLAN, 4, 2)])
    assert list(comparison.actions) == [(stage, kind) for stage in range(3) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    forward, backward = comparison.actions[1, Kind.FORWARD], comparison.actions[1, Kind.BACKWARD]
    assert (forward.simulated, forward.measured, forward.ratio) == (1, 3, 3)
    assert (backward.simulated, backward.measured, backward.ratio) == (2, 2, 1)
    assert comparison.num_timelines == 2
    assert comparison.step.simulated == 18
    assert comparison.step.measured == (6 * 4 + 6 * 6) / 2
    assert comparison.bubble.simulated == pytest.approx(1 / 3)
    assert comparison.bubble.measured == pytest.approx(1 / 3)


def test_a_clock_that_does_not_start_at_zero() -> None:
    def later(span: Span) -> Span:
        return Span(span.action, span.start + 1000, span.stop + 1000)

    moved = replace(SIMULATED, devices=tuple(tuple(map(later, device)) for device in SIMULATED.devices))
    comparison = compare_timelines(SIMULATED, [moved])
    assert comparison.step.ratio == pytest.approx(1)
    assert comparison.bubble.measured == pytest.approx(comparison.bubble.simulated)


def test_collectives_count_on_neither_side() -> None:
    summed = replace(SIMULATED, reductions=(Collective(0, (0, 1), 18, 30),))
    spans = (*SIMULATED.devices[0], Span(Action(2, Kind.REDUCE, 0), 18, 19))
    measured = replace(SIMULATED, devices=(spans, *SIMULATED.devices[1:]))
    comparison = compare_timelines(summed, [measured])
    assert comparison.step.simulated == comparison.step.measured == 18
    assert {kind for _, kind in comparison.actions} == {Kind.FORWARD, Kind.BACKWARD}


def test_what_one_side_lacks() -> None:
    spans = (Span(Action(2, Kind.DATA, 0), 0, 0.5), *SIMULATED.devices[0])
    measured = replace(SIMULATED, devices=(spans, *SIMULATED.devices[1:]))
    comparison = compare_timelines(SIMULATED, [measured])
    pair = comparison.actions[2, Kind.DATA]
    assert (pair.simulated, pair.measured, pair.ratio) == (None, 0.5, None)
    assert "| 2 stage2 | data     |         - |   500 ms |     - |" in comparison_text(comparison)


def test_the_table() -> None:
    text = comparison_text(compare_timelines(SIMULATED, [timeline_of(PLAN, 1.5, 2)]))
    assert text.splitlines()[-3:] == [
        "| 2 stage2 | backward |       2 s |      2 s |  1.00 |",
        "| all      | step     |      18 s |     21 s |  1.17 |",
        "| all      | idle     |      33 % |     33 % |     - |",
    ]
    assert "| 0 stage0 | forward  |       1 s |    1.5 s |  1.50 |" in text


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ScheduleError, match="No mini-batch of the plan's size was measured"):
        compare_timelines(SIMULATED, [])
    with pytest.raises(ScheduleError, match=r"stages \['stage0', 'stage1'\] cannot be compared .* 'stage2'\]"):
        compare_timelines(SIMULATED, [timeline_of(chain([1, 1], 4), 1, 2)])
