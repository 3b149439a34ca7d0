"""Figures of a program on every device, and partitioners or schedules side by side."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports import comparison_table, devices_text
from lightning_gpp.reports.tables import devices_in_flight
from lightning_gpp.schedules import Kind, compile_program
from lightning_gpp.simulation import StageCosts, simulate
from tests.strategies import chain, plan_of, plans, towers


def predicted(plan: Plan, memory_bytes: float = 0.0, *, training: bool = True) -> Prediction:
    limits = (memory_bytes,) * plan.num_devices
    timeline = simulate(compile_program(plan, training=training), StageCosts.uniform(plan, 1, 2))
    return Prediction(plan=plan, timeline=timeline, memory_bytes=limits)


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_figures_of_a_chain() -> None:
    plan = chain([2, 2, 2], 8)  # on devices 2, 1, 0; 4 bytes per sample on every edge
    idle = "33 %"  # 12 of 18 s: (4 micro-batches + 2 to fill the pipeline) x 3
    assert cells_of(devices_text(predicted(plan))) == [
        ["0", "stage 2", idle, "1 B", "1", "4 (32 B)", "4 (32 B)"],
        ["1", "stage 1", idle, "2 B", "2", "8 (64 B)", "8 (64 B)"],
        ["2", "stage 0", idle, "3 B", "3", "4 (32 B)", "4 (32 B)"],
    ]


def test_devices_that_are_alike_share_a_row() -> None:
    plan = plan_of([(0, 1)], [2, 2], 4, devices=[(1, 2, 3), (0,)])
    text = devices_text(predicted(plan, 4))
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["0", "1", "2-3"]  # 2 samples
    assert "1 B of 4 B, 25 %" in text


def test_inference_keeps_one_micro_batch() -> None:
    prediction = predicted(chain([1, 1, 1], 4, schedule="gpipe"), training=False)
    assert devices_in_flight(prediction) == [1, 1, 1]
    assert [row[5] for row in cells_of(devices_text(prediction))] == ["-", "4 (16 B)", "4 (16 B)"]


@settings(max_examples=20, deadline=None)
@given(plan=plans())
def test_what_is_in_flight_takes_memory(plan: Plan) -> None:
    program, prediction = compile_program(plan), predicted(plan)
    entries = zip(devices_in_flight(prediction), prediction.peak_bytes, program.devices, strict=True)
    for in_flight, peak, instructions in entries:
        actions = [i.action for i in instructions if i.action is not None]
        forwards = sum(action.kind is Kind.FORWARD for action in actions)
        assert (forwards > 0) <= in_flight <= forwards
        assert peak <= in_flight  # one byte each, empty shares none


def test_the_table_of_schedules() -> None:
    few, many = predicted(towers(2, 2, 4), 3), predicted(towers(2, 2, 4, schedule="gpipe"), 3)
    outcomes = [("1f1b", replace(few, lower_bound=16.0)), ("gpipe", many), ("other", "It cannot.")]
    table = comparison_table("schedule", outcomes)
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines()[:5])
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["peak memory"] for row in cells] == ["3 B", "4 B, 1 B TOO MUCH", "-"]
    assert [row["in flight"] for row in cells] == ["3", "4", "-"]
    assert [row["gap"] for row in cells] == ["12.5 %", "-", "-"]
    assert [row["of the best"] for row in cells] == ["1.000", "1.000", "-"]
    assert cells[0]["step"] == cells[1]["step"] == "18 s"
    assert table.endswith("\n\nother: It cannot.")
