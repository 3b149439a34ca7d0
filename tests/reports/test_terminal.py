"""Text that fits the terminal, in the colours of the pictures."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import partitioners_table, prediction_text, terminal_width
from lightning_gpp.reports.palette import stage_color, tint
from lightning_gpp.reports.terminal import PIPE, colored, show
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate
from tests.strategies import towers


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """Two towers of two stages; the first stage has more modules than its name tells."""
    plan = towers(2, 2, 6)
    first = replace(plan.stages[0], name="tower/1", modules=tuple(f"tower.blocks.{n}.projection" for n in range(9)))
    plan = replace(plan, stages=(first, *plan.stages[1:]))
    timeline = simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))
    return Prediction(plan=plan, timeline=timeline, memory_bytes=(4.0,) * 5)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_longer_than_the_terminal(prediction: Prediction, width: int) -> None:
    text = prediction_text(prediction, width)
    assert max(map(len, text.splitlines())) <= width
    assert "tower/1" in text


def test_stages_stay_together_where_lines_break(prediction: Prediction) -> None:
    assert (
        "step 24 s, idle 25 %; warm-up/peak in flight: tower/1 3/3, stage1 2/2,\n"
        "    stage2 3/3, stage3 2/2, stage4 1/1\n"
    ) in prediction_text(prediction, 70)


def test_narrow_tables_leave_out_what_matters_least(prediction: Prediction) -> None:
    """What has no column is below the table, or in the stage graph."""
    narrow, wide = (prediction_text(prediction, width) for width in (80, 300))
    assert "| in-edges" in wide.splitlines()[0]
    assert "| in-edges" not in narrow.splitlines()[0]
    assert "| parameters |" in narrow.splitlines()[0]
    assert "0 tower/1: tower.blocks.0.projection, ..., tower.blocks.8.projection (9 modules)" in narrow
    assert "1 stage1: module1" in narrow
    assert "|       0 | stage 4 " in narrow


def test_a_comparison_tells_what_it_leaves_out(prediction: Prediction) -> None:
    rows = [("auto", prediction), ("pipedream", "no plan " * 30)]
    text = partitioners_table(rows, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "| step |" in text.replace("  ", "")
    assert "Left out at 80 columns (set COLUMNS for more): " in text
    assert "Left out" not in partitioners_table(rows, 200)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal_width() == 132
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal_width() == 60
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert terminal_width() == PIPE


def test_colours_are_those_of_the_pictures(prediction: Prediction) -> None:
    text = prediction_text(prediction, 100)
    styles = {(text[span.start : span.end], str(span.style)) for span in colored(text, prediction.plan).spans}
    assert ("0 tower/1", stage_color(0)) in styles
    forward, backward = (f"#111111 on {color}" for color in (tint(stage_color(4)), stage_color(4)))
    row = next(line for line in text.splitlines() if line.startswith("device 0 |"))
    assert {("F0", forward), ("B5", backward)} <= {(name.rstrip("="), style) for name, style in styles}, row


def test_pipes_get_plain_text(prediction: Prediction, capsys: pytest.CaptureFixture[str]) -> None:
    text = prediction_text(prediction, 80)
    show(text, prediction.plan)
    assert capsys.readouterr().out == f"{text}\n"


def test_colours_change_no_character(prediction: Prediction) -> None:
    text = prediction_text(prediction, 80)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(colored(text, prediction.plan), soft_wrap=True)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in written
    plain = Console(file=io.StringIO(), force_terminal=False, width=80)
    plain.print(colored(text, prediction.plan), soft_wrap=True)
    assert plain.file.getvalue() == f"{text}\n"  # type: ignore[attr-defined]
