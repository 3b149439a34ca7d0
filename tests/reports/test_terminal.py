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

WITHOUT_MODULES = ("devices", "samples", "parameters", "FLOPs", "activations", "in flight")


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


def test_narrow_terminals_show_fewer_columns_instead_of_broken_words(prediction: Prediction) -> None:
    header = prediction_text(prediction, 80).splitlines()[0]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == ["stage", *WITHOUT_MODULES]
    assert "| modules " in prediction_text(prediction, 200)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal_width() == 132
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal_width() == 60
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert terminal_width() == PIPE
