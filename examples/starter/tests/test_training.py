"""The network learns, in one process."""

from __future__ import annotations

import lightning as L

from starter.data import Pairs
from starter.model import TwoTowers


def test_it_learns() -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(TwoTowers(), Pairs())
    assert trainer.callback_metrics["val/accuracy"] > 0.5
