"""Simulated timelines against measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.reports import comparison_text
from lightning_gpp.schedules import Action, Kind, compile_program
from lightning_gpp.simulation import Collective, Span, StageCosts, Timeline, simulate
from tests.strategies import chain


def timeline_of(plan: Plan, forward: float, backward: float) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, forward, backward))


PLAN = chain([1, 1, 1], 4)
SIMULATED = timeline_of(PLAN, 1, 2)


def rows_of(simulated: Timeline, *measured: Timeline) -> dict[str, list[str]]:
    """Simulated, measured and ratio, by stage and action."""
    rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in comparison_text(simulated, measured).splitlines()[2:]
    )
    return {f"{stage} {kind}": cells for stage, kind, *cells in rows}


def test_means_of_every_kind_and_stage() -> None:
    rows = rows_of(SIMULATED, timeline_of(PLAN, 2, 2), timeline_of(PLAN, 4, 2))
    stages = [f"{stage} stage{stage} {kind}" for stage in range(3) for kind in ("forward", "backward")]
    assert list(rows) == [*stages, "all step", "all idle"]
    assert rows["1 stage1 forward"] == ["1 s", "3 s", "3.00"]
    assert rows["1 stage1 backward"] == ["2 s", "2 s", "1.00"]
    assert rows["all step"] == ["18 s", f"{(6 * 4 + 6 * 6) // 2} s", "1.67"]
    assert rows["all idle"] == ["33 %", "33 %", "-"]


def test_a_clock_that_does_not_start_at_zero() -> None:
    def later(span: Span) -> Span:
        return Span(span.action, span.start + 1000, span.stop + 1000)

    moved = replace(SIMULATED, devices=tuple(tuple(map(later, device)) for device in SIMULATED.devices))
    rows = rows_of(SIMULATED, moved)
    assert rows["all step"] == ["18 s", "18 s", "1.00"]
    assert rows["all idle"][0] == rows["all idle"][1]


def test_collectives_count_on_neither_side() -> None:
    summed = replace(SIMULATED, reductions=(Collective(0, (0, 1), 18, 30),))
    spans = (*SIMULATED.devices[0], Span(Action(2, Kind.REDUCE, 0), 18, 19))
    measured = replace(SIMULATED, devices=(spans, *SIMULATED.devices[1:]))
    rows = rows_of(summed, measured)
    assert rows["all step"] == ["18 s", "18 s", "1.00"]
    assert len(rows) == 3 * 2 + 2


def test_what_one_side_lacks() -> None:
    spans = (Span(Action(2, Kind.DATA, 0), 0, 0.5), *SIMULATED.devices[0])
    measured = replace(SIMULATED, devices=(spans, *SIMULATED.devices[1:]))
    assert rows_of(SIMULATED, measured)["2 stage2 data"] == ["-", "500 ms", "-"]


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ScheduleError, match="No mini-batch of the plan's size was measured"):
        comparison_text(SIMULATED, [])
    with pytest.raises(ScheduleError, match=r"stages \['stage0', 'stage1'\] cannot be compared .* 'stage2'\]"):
        comparison_text(SIMULATED, [timeline_of(chain([1, 1], 4), 1, 2)])
