"""A callback that writes the plan and its simulated timeline to the run folder."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import run_text, timeline_text
from lightning_gpp.strategy import GPPStrategy


class RunReport(L.Callback):
    """Prints the simulated timeline, and writes it (text and JSON) and the plan, at the start on global rank 0.

    Args:
        folder: folder for `plan.yaml`, `timeline.txt` and `timeline.json`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, GPPStrategy) or strategy.plan is None or not trainer.is_global_zero:
            return
        prediction = Prediction(plan=strategy.plan, num_pipelines=strategy.num_pipelines, timeline=strategy.timeline())
        print(f"One mini-batch, simulated:\n{timeline_text(prediction.timeline)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "timeline.txt").write_text(f"{run_text(prediction)}\n")
        prediction.plan.save(self.folder / "plan.yaml")
        prediction.timeline.save(self.folder / "timeline.json")
