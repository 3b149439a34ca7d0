"""A callback that writes plan, simulated timeline and report to the run folder."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import period_text, prediction_text, terminal_width, timeline_text
from lightning_gpp.simulation import trace_of
from lightning_gpp.strategy import GPPStrategy


class RunReport(L.Callback):
    """Prints the simulated timeline and period, writes them and the plan at the start, and the report at the end.

    Only global rank 0 writes.

    Args:
        folder: folder for `plan.yaml`, `timeline.txt`, `timeline.json` (for https://ui.perfetto.dev) and `report.html`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = _strategy(trainer)
        if strategy is None or strategy.plan is None:
            return
        plan, period = strategy.plan, strategy.period()
        timeline, pipelines = strategy.timeline(), strategy.num_pipelines
        prediction = Prediction(plan=plan, num_pipelines=pipelines, timeline=timeline, period=period)
        what = "One mini-batch" if period is None else "Mini-batches without a flush"
        print(f"{what}, simulated:\n{timeline_text(prediction.drawn, terminal_width())}")
        if period is not None:
            print(period_text(plan, period))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "timeline.txt").write_text(f"{prediction_text(prediction)}\n")
        plan.save(self.folder / "plan.yaml")
        trace_of(prediction.drawn).save(self.folder / "timeline.json")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = _strategy(trainer)
        if strategy is not None and strategy.plan is not None:
            strategy.report(self.folder / "report.html")


def _strategy(trainer: L.Trainer) -> GPPStrategy | None:
    """The strategy on the rank that writes."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, GPPStrategy) and trainer.is_global_zero else None
