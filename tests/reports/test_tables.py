"""Tables of plans, of their devices, of schedules side by side, and of simulated and measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction, manual
from lightning_gpp.reports import comparison_table, comparison_text, devices_text, graph_text, plan_table
from lightning_gpp.reports.units import count, duration, percent, rate, size
from lightning_gpp.schedules import Action, Kind, compile_program
from lightning_gpp.simulation import Collective, Span, StageCosts, Timeline, simulate
from tests.planning import graphs
from tests.strategies import chain, plan_of, towers

PLAN = manual(
    graphs.two_towers(num_blocks=1),
    [
        {"modules": ["image_tower"], "devices": [1, 2], "micro_batch_size": 8},
        {"modules": ["text_tower"], "devices": [3]},
        {"modules": ["head"], "devices": [0]},
    ],
    batch_size=16,
    micro_batch_size=4,
)

TABLE = """\
| stage         | modules     | devices | samples | parameters | FLOPs | activations | in flight |
|---------------|-------------|---------|---------|------------|-------|-------------|-----------|
| 0 image_tower | image_tower |     1,2 |       8 |      4.09k |    8M |       8 KiB |         2 |
| 1 text_tower  | text_tower  |       3 |       4 |      4.09k |    4M |       4 KiB |         2 |
| 2 head        | head, @step |       0 |       4 |        819 |  800k |       4 KiB |         1 |

3 stages on 4 devices, depth 2, schedule 1f1b, mini-batch of 16 samples in 2/4 micro-batches"""


def test_devices_of_several_processes() -> None:
    text = plan_table(replace(PLAN, tensor_parallel_size=2))
    assert f"{PLAN.num_devices} devices ({2 * PLAN.num_devices} processes), depth" in text


def test_table_is_markdown_and_lines_up() -> None:
    assert plan_table(PLAN) == TABLE


def test_long_lists_of_modules_are_cut() -> None:
    plan = manual(graphs.chain(30), {f"blocks.{i}": int(i > 20) for i in range(30)}, batch_size=4)
    assert "| blocks.0, ..., blocks.20 (21 modules) " in plan_table(plan)


def test_artificial_edges_are_marked() -> None:
    assert "image_tower -> text_tower: order only" in graph_text(PLAN.chained())


def test_whole_model_has_a_name() -> None:
    assert "(whole model), @step" in plan_table(manual(graphs.chain(), {"": 0}, batch_size=4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(0), "0"),
        (count(999.7), "1k"),
        (count(1_234_567), "1.23M"),
        (size(1000), "0.977 KiB"),
        (duration(0.0021), "2.1 ms"),
        (duration(0), "0 s"),
        (percent(0.256), "26 %"),
        (rate(2399.2), "2399"),
        (rate(25243.7), "25240"),
    ],
)
def test_human_numbers(text: str, expected: str) -> None:
    assert text == expected


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
        ["0", "stage 2", idle, "1 B", "4 (32 B)", "4 (32 B)"],
        ["1", "stage 1", idle, "2 B", "8 (64 B)", "8 (64 B)"],
        ["2", "stage 0", idle, "3 B", "4 (32 B)", "4 (32 B)"],
    ]


def test_devices_that_are_alike_share_a_row() -> None:
    plan = plan_of([(0, 1)], [2, 2], 4, devices=[(1, 2, 3), (0,)])
    text = devices_text(predicted(plan, 4))
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["0", "1", "2-3"]  # 2 samples
    assert "1 B of 4 B, 25 %" in text


def test_inference_sends_only_forwards() -> None:
    prediction = predicted(chain([1, 1, 1], 4, schedule="gpipe"), training=False)
    assert [row[4] for row in cells_of(devices_text(prediction))] == ["-", "4 (16 B)", "4 (16 B)"]


def test_the_table_of_schedules() -> None:
    few, many = predicted(towers(2, 2, 4), 3), predicted(towers(2, 2, 4, schedule="gpipe"), 3)
    outcomes = [("1f1b", replace(few, lower_bound=16.0)), ("gpipe", many), ("other", "It cannot.")]
    table = comparison_table("schedule", outcomes)
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines()[:5])
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["peak memory"] for row in cells] == ["3 B", "4 B, 1 B TOO MUCH", "-"]
    assert [row["gap"] for row in cells] == ["12.5 %", "-", "-"]
    assert [row["of the best"] for row in cells] == ["1.000", "1.000", "-"]
    assert cells[0]["step"] == cells[1]["step"] == "18 s"
    assert table.endswith("\n\nother: It cannot.")


def timeline_of(plan: Plan, forward: float, backward: float) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, forward, backward))


THREE = chain([1, 1, 1], 4)
SIMULATED = timeline_of(THREE, 1, 2)


def rows_of(simulated: Timeline, *measured: Timeline) -> dict[str, list[str]]:
    """Simulated, measured and ratio, by stage and action."""
    rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in comparison_text(simulated, measured).splitlines()[2:]
    )
    return {f"{stage} {kind}": cells for stage, kind, *cells in rows}


def test_means_of_every_kind_and_stage() -> None:
    rows = rows_of(SIMULATED, timeline_of(THREE, 2, 2), timeline_of(THREE, 4, 2))
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
