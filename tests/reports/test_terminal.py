"""Text that fits the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import comparison_table, prediction_text, terminal_width
from lightning_gpp.reports.terminal import PIPE
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
    rows = [("auto", prediction), ("pipedream", "no plan " * 30)]
    text = f"{prediction_text(prediction, width)}\n{comparison_table('partitioner', rows, width)}"
    assert max(map(len, text.splitlines())) <= width
    assert "tower/1" in text


def test_stages_stay_together_where_lines_break(prediction: Prediction) -> None:
    assert (
        "step 24 s, idle 25 %; in flight: tower/1 3, stage1 2,\n    stage2 3, stage3 2, stage4 1\n"
    ) in prediction_text(prediction, 60)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal_width() == 132
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal_width() == 60
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert terminal_width() == PIPE
