"""A run that is killed goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.strategy import harness
from tests.strategy.harness import loader, make_module

KILLED_IN_EPOCH = 2


class Kill(Callback):
    """Kills the process of one rank in the middle of an epoch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == KILLED_IN_EPOCH and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(rank: int, folder: str, kill: bool, ckpt_path: str | None) -> list[float]:
    pl.seed_everything(5, verbose=False)
    module = make_module()
    callbacks: list[Callback] = [ModelCheckpoint(folder, save_last=True), *([Kill()] if kill else [])]
    strategy = harness.strategy(failure_timeout=10.0)
    trainer = harness.trainer(strategy, 2, max_epochs=4, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module.losses


def test_a_killed_run_resumes_to_the_same_losses(tmp_path: Path) -> None:
    whole = harness.run(2, fit, str(tmp_path / "whole"), False, None)[0]
    with pytest.raises(AssertionError, match="ended without a report"):
        harness.run(2, fit, str(tmp_path / "killed"), True, None)
    last = tmp_path / "killed" / "last.ckpt"
    resumed = harness.run(2, fit, str(tmp_path / "resumed"), False, str(last))[0]
    steps_per_epoch = len(whole) // 4
    assert resumed == pytest.approx(whole[KILLED_IN_EPOCH * steps_per_epoch :], rel=1e-12)
