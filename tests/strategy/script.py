"""A training script as a user would write it; run by the launch tests."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

import lightning_gpp  # noqa: F401  registers "gpp"
from tests.strategy.harness import TwoTowers, loader


class Fault(Callback):
    """Ends the process, or raises, in the third mini-batch of one rank."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the fault of this test")


def main(folder: str, kind: str, rank: str) -> None:
    warnings.simplefilter("ignore")
    if kind == "orphan" and os.environ.get("LOCAL_RANK") == "1":
        parent = os.getppid()
        Path(folder, "started").touch()
        while os.getppid() == parent:
            time.sleep(0.05)  # until rank 0 is gone, before there is a process group
    L.seed_everything(1, verbose=False)
    options: dict[str, Any] = {"trace": True, "failure_timeout": 20.0}
    strategy: Any = "gpp" if kind == "default" else lightning_gpp.GPPStrategy(**options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Fault(kind, int(rank))] if kind in ("kill", "raise") else [],
    )
    module = TwoTowers().double()
    trainer.fit(module, loader(), loader(10, seed=2))
    print(f"rank {trainer.global_rank} of {trainer.world_size} ended with {module.losses[-1]:.12f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
