"""The curves of a run's report have the values that loggers get, at the steps after which they were computed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_gpp.cli.run_report import RunReport
from tests.strategy.harness import loader, make_module, run, strategy, trainer


def curves(rank: int, folder: str) -> dict[str, Any]:
    report, table = RunReport(f"{folder}/report"), CSVLogger(folder, name="logs", version="")
    machine = trainer(strategy(), 2, callbacks=[report], logger=table, log_every_n_steps=1, val_check_interval=2)
    machine.fit(make_module(), loader(32), loader(10, seed=2))
    return report._curves


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The table, with the number of optimizer steps done; Lightning's steps begin at 0."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader((folder / "logs" / "metrics.csv").read_text().splitlines()):
        for name, value in row.items():
            if value and name not in ("epoch", "step"):
                found.setdefault(name, []).append((int(row["step"]) + 1, float(value)))
    return found


def test_points_stand_where_their_values_were_computed(tmp_path: Path) -> None:
    found, _ = run(2, curves, str(tmp_path))
    expected = logged(tmp_path)
    assert [step for step, _ in expected["val_loss"]] == [2, 4, 6, 8]
    for name in ("train_loss_step", "train_loss_epoch", "val_loss", "val_kept"):
        assert [step for step, _ in found[name]] == [step for step, _ in expected[name]], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in expected[name]]), name
