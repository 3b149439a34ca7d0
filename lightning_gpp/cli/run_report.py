"""A callback that writes plan, simulated timeline and report to the run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import period_text, run_text, timeline_text
from lightning_gpp.reports.page import RunRecord
from lightning_gpp.reports.terminal import show, terminal_width
from lightning_gpp.strategy import GPPStrategy


class RunReport(L.Callback):
    """Prints the simulated timeline and period, writes them and the plan at the start, and the report at the end.

    Only global rank 0 writes.

    Args:
        folder: folder for `plan.yaml`, `timeline.txt`, `timeline.json` and `report.html`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._throughput: list[tuple[int, float]] = []
        self._latest: tuple[int, float] | None = None
        """The optimizer steps so far and the time, at the end of the latest mini-batch without validation since."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = _strategy(trainer)
        if strategy is None or strategy.plan is None:
            return
        prediction = Prediction(
            plan=strategy.plan,
            num_pipelines=strategy.num_pipelines,
            timeline=strategy.timeline(),
            period=strategy.period(),
        )
        what = "One mini-batch" if prediction.period is None else "Mini-batches without a flush"
        show(f"{what}, simulated:\n{timeline_text(prediction.drawn, terminal_width())}", prediction.plan)
        if prediction.period is not None:
            show(period_text(prediction.plan, prediction.period), prediction.plan)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "timeline.txt").write_text(f"{run_text(prediction)}\n")
        prediction.plan.save(self.folder / "plan.yaml")
        prediction.drawn.save(self.folder / "timeline.json")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        strategy, now = _strategy(trainer), (trainer.global_step, time.perf_counter())
        if strategy is None or strategy.plan is None:
            return
        if self._latest is not None and now[0] > self._latest[0]:
            samples = strategy.plan.batch_size * strategy.num_pipelines * trainer.accumulate_grad_batches
            seconds = (now[1] - self._latest[1]) / (now[0] - self._latest[0])
            self._throughput.append((now[0], samples / seconds))
        if self._latest is None or now[0] > self._latest[0]:
            self._latest = now

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Notes what was logged since the last optimizer step: Lightning hands it out after all hooks of a batch."""
        if _strategy(trainer) is not None:
            self._note_metrics(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._latest = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._latest = None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = _strategy(trainer)
        if strategy is None or strategy.plan is None:
            return
        self._note_metrics(trainer)
        record = RunRecord(curves=self._curves, samples_per_second=self._throughput)
        strategy.report(self.folder / "report.html", record)

    def _note_metrics(self, trainer: L.Trainer) -> None:
        """Logged metrics that have changed."""
        for name, value in trainer.logged_metrics.items():
            curve = self._curves.setdefault(name, [])
            if name != "epoch" and (not curve or curve[-1][1] != float(value)):
                curve.append((trainer.global_step, float(value)))


def _strategy(trainer: L.Trainer) -> GPPStrategy | None:
    """The strategy on the rank that writes."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, GPPStrategy) and trainer.is_global_zero else None
