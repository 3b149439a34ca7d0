"""Figures of a program on every device, and schedules side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports import Traffic, schedule_figures, schedule_text, schedules_table
from lightning_gpp.schedules import Kind, compile_program
from lightning_gpp.simulation import StageCost, StageCosts, Timeline, simulate
from tests.strategies import chain, plan_of, plans, towers


def timeline_of(plan: Plan) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))


def test_figures_of_a_chain() -> None:
    plan = chain([2, 2, 2], 8)  # on devices 2, 1, 0; 4 bytes per sample on every edge
    figures = schedule_figures(compile_program(plan), timeline_of(plan))
    assert [entry.stages for entry in figures] == [(2,), (1,), (0,)]
    assert [entry.in_flight for entry in figures] == [1, 2, 3]
    assert [entry.peak_bytes for entry in figures] == [1, 2, 3]
    one_way = Traffic(4, 32)
    assert [entry.sent for entry in figures] == [one_way, one_way + one_way, one_way]
    assert figures[1].traffic == Traffic(16, 128)
    step = 18  # seconds: (4 micro-batches + 2 to fill the pipeline) x 3
    assert [entry.bubble_fraction for entry in figures] == pytest.approx([1 - 12 / step] * 3)


def test_sharded_parameters_are_gathered_dropped_and_summed() -> None:
    plan = replace(plan_of([(0, 1)], [2, 2], 4, devices=[(1, 2), (0,)]), sharding="fsdp")
    one, two, three = schedule_figures(compile_program(plan), timeline_of(plan))
    assert (one.unshards, one.reshards, one.reductions) == (0, 0, 0)
    assert (two.unshards, two.reshards, two.reductions) == (1, 1, 1)
    assert replace(three, device=1) == two


def test_devices_that_are_alike_share_a_row() -> None:
    plan = plan_of([(0, 1)], [2, 2], 4, devices=[(1, 2, 3), (0,)])
    text = schedule_text(schedule_figures(compile_program(plan), timeline_of(plan)))
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["0", "1", "2-3"]  # 2 samples
    assert "reductions" in text
    assert "unshards" not in text  # nothing is gathered


def test_a_device_alone_sends_nothing() -> None:
    plan = plan_of([(0, 1)], [1, 1], 2, devices=[(0,), (0,)])
    figures = schedule_figures(compile_program(plan), timeline_of(plan))
    assert figures[0].traffic == Traffic()
    assert "sent" not in schedule_text(figures)


def test_inference_keeps_one_micro_batch() -> None:
    plan = chain([1, 1, 1], 4, schedule="gpipe")
    program = compile_program(plan, training=False)
    figures = schedule_figures(program, simulate(program, StageCosts.uniform(plan)))
    assert [entry.in_flight for entry in figures] == [1, 1, 1]
    assert sum(entry.sent.messages for entry in figures) == 2 * 4


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_what_is_sent_is_received_and_what_is_in_flight_takes_memory(plan: Plan) -> None:
    program = compile_program(plan)
    figures = schedule_figures(program, simulate(program, StageCosts.uniform(plan, 1, 2)))
    sent = sum((entry.sent for entry in figures), Traffic())
    remote = [message for message in program.messages if message.src != message.dst]
    assert sent.messages == len(remote) == sum(entry.received.messages for entry in figures)
    assert sent.num_bytes == pytest.approx(sum(entry.received.num_bytes for entry in figures))
    for entry, instructions in zip(figures, program.devices, strict=True):
        held = set(plan.stages_on(entry.device))
        actions = [i.action for i in instructions if i.action is not None]
        forwards = sum(action.kind is Kind.FORWARD for action in actions)
        assert (forwards > 0) <= entry.in_flight <= forwards
        assert all(action.stage in held for action in actions)
        assert entry.peak_bytes <= entry.in_flight  # one byte each, empty shares none


def predicted(plan: Plan, memory_bytes: float) -> Prediction:
    limits = (memory_bytes,) * plan.num_devices
    return Prediction(plan=plan, timeline=timeline_of(plan), memory_bytes=limits)


def test_the_table_of_schedules() -> None:
    few, many = predicted(towers(2, 2, 4), 3), predicted(towers(2, 2, 4, schedule="gpipe"), 3)
    table = schedules_table([("1f1b", replace(few, lower_bound=16.0)), ("gpipe", many), ("other", "It cannot.")])
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines()[:5])
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["peak memory"] for row in cells] == ["3 B", "4 B, 1 B TOO MUCH", "-"]
    assert [row["in flight"] for row in cells] == ["3", "4", "-"]
    assert [row["gap"] for row in cells] == ["12.5 %", "-", "-"]
    assert cells[0]["step"] == cells[1]["step"] == "18 s"
    assert table.endswith("\n\nother: It cannot.")


def test_figures_follow_unequal_costs() -> None:
    plan = chain([1, 1], 2)
    costs = StageCosts(stages=(StageCost(forward=Affine(0, 3)), StageCost(forward=Affine(0, 1))))
    program = compile_program(plan)
    short, long = schedule_figures(program, simulate(program, costs))
    assert short.bubble_fraction > long.bubble_fraction
