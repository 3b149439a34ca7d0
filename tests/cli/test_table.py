"""A run that goes on in its folder adds to its table of metrics."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning_gpp.cli.table import MetricsTable


def log(folder: Path, *rows: tuple[int, dict[str, float]]) -> None:
    table = MetricsTable(folder, name="logs", version="")
    for step, metrics in rows:
        table.log_metrics(metrics, step)
    table.finalize("success")


def test_rows_of_an_earlier_part_stay(tmp_path: Path) -> None:
    log(tmp_path, (0, {"loss": 3.0}), (1, {"loss": 2.0, "accuracy": 0.5}))
    log(tmp_path, (2, {"rate": 0.1}), (3, {"loss": 1.0}))
    with (tmp_path / "logs/metrics.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == [
        {"loss": 3.0, "step": 0},
        {"loss": 2.0, "accuracy": 0.5, "step": 1},
        {"rate": 0.1, "step": 2},
        {"loss": 1.0, "step": 3},
    ]
