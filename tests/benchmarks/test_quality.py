"""The benchmark of what asynchrony does to the loss: every method trains, and the tables are complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality import training
from benchmarks.quality.sweep import METHODS, method_of, pipelines_of, runs
from benchmarks.quality.tables import BEGIN, END, pages, write
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Outcome, Run, train
from tests.sampling import sample

NUM_STEPS = 24


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TASKS", {name: replace(task, num_steps=NUM_STEPS) for name, task in TASKS.items()})


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("method", sample(METHODS, [*METHODS][::4]))
def test_every_method_trains(method: str) -> None:
    """Within a few steps, to no more than the loss of knowing nothing, which is 0.69, and its noise."""
    num_stages, chain = pipelines_of("towers", method)[-1]
    run = Run(task="towers", optimizer="adamw", method=method, num_stages=num_stages, chain=chain, rate=1e-3, seed=0)
    assert train(run, method_of(method, NUM_STEPS)).validation < 0.75


def test_tables_have_the_seeds_that_are_complete() -> None:
    done = {run: Outcome(validation=run.rate) for run in runs() if run.seed < 2}
    last = next(run for run in done if run.task == "towers" and run.optimizer == "sgd" and run.seed == 1)
    del done[last]
    assert "Seeds: text, adamw: 2; towers, adamw: 2; towers, sgd: 1.\n" in pages(done)


def test_tables_have_every_run(tmp_path: Path) -> None:
    """Outcomes whose loss is the rate, so that the smallest rate is best."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, pages({run: Outcome(validation=run.rate) for run in runs()}))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1], "old" in lines) == ("before", "after", False)
    assert "| text | 8 | chain | 7 6 5 4 3 2 1 0 |" in lines
    assert "| towers | 8 | graph | 4 3 2 4 3 2 1 0 |" in lines
    assert "| towers, sgd | 12 | MSNAG | 0.003 ± 0.000 | 0.003 ± 0.000 | +0.000 | 0 of 9 |" in lines
