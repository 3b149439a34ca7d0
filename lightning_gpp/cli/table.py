"""Metrics as a table that a run which goes on in its folder continues."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger


class MetricsTable(CSVLogger):
    """Lightning's logger, but rows of an earlier part of the run stay, which Lightning deletes.

    Arguments are those of `CSVLogger`. After a crash, the steps since the newest checkpoint are in the table twice.
    """

    _table: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the table."""
        if self._table is None:
            path = Path(self.log_dir) / "metrics.csv"
            before = path.read_text() if path.is_file() else ""
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
                self._table = super().experiment
            if before:
                path.write_text(before)
                self._table.metrics_keys = next(csv.reader(before.splitlines()))
        return self._table
