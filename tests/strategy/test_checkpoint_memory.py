"""A rank needs memory for its own part only, to save and to load a model that is several times as large."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategy import harness
from tests.strategy.harness import loader, make_module

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

WIDTH, DEPTH, RANKS = 1024, 32, 4
SHARE = 3 * DEPTH * WIDTH * (WIDTH + 1) * 4
"""Bytes of the parameters of a rank and of their optimizer's state."""


class Large(pl.LightningModule):
    """As many equal parts as there are ranks, built without memory."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)] for _ in range(RANKS)]
            self.parts = nn.Sequential(*(nn.Sequential(*part) for part in layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.parts(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Peaks(pl.Callback):
    """Notes how much memory loading and saving need."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.peaks: dict[str, float] = {}
        self.before = memory("VmRSS")

    def on_train_start(self, *_: Any) -> None:
        self.peaks["load"] = (memory("VmHWM") - self.before) / SHARE

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None:
            before = reset_peak()
            trainer.save_checkpoint(self.path)
            self.peaks["save"] = (memory("VmHWM") - before) / SHARE


def memory(kind: str) -> int:
    """Memory of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def reset_peak() -> int:
    """Forget the peak; returns the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def train(rank: int, source: str | None, path: str | None) -> dict[str, float]:
    stages = [{"modules": [f"parts.{i}"], "devices": [RANKS - 1 - i]} for i in range(RANKS)]
    stages[-1]["modules"].append("@step")
    warm_up = harness.trainer(harness.strategy(stages={"left": 0, "right": 1, "head": 1}, num_pipelines=2), RANKS)
    warm_up.fit(make_module(), loader())  # imports, pools of memory
    strategy = harness.strategy(stages=stages, state_dict_type="sharded", self_check=False)
    reset_peak()
    peaks = Peaks(path)
    data = DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=8)
    harness.trainer(strategy, RANKS, callbacks=[peaks], max_epochs=1 + (source is not None)).fit(
        Large(), data, ckpt_path=source
    )
    return peaks.peaks


def test_peak_memory_is_that_of_the_rank_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "large.ckpt")
    saved = harness.run(RANKS, train, None, path, timeout=250)
    loaded = harness.run(RANKS, train, path, None, timeout=250)
    assert all(peaks["save"] < 0.1 for peaks in saved)
    set_up = max(peaks["load"] for peaks in saved) - 1 / 3  # what a run needs besides its parameters, without loading
    assert all(peaks["load"] - set_up < 1.1 for peaks in loaded), (saved, loaded)
