"""What each process of an elastic job runs: a run that plans for what there is, and goes on from its newest checkpoint.

As a script it is what torchrun starts; the working directory is shared. STEP_SECONDS and STEPS are in the environment.
"""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_gpp import GPPStrategy
from lightning_gpp.cli.job import newest_checkpoint
from tests.failure.program import Numbers


class Module(L.LightningModule):
    """A chain of equal layers, one for each of the most processes; prints losses, and when and with how many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(8))
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).sub(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(float(os.environ["STEP_SECONDS"]))
        if self.trainer.global_rank == 0:
            loss = float(outputs["loss"]).hex()
            print(f"trained {self.trainer.global_step} {loss} {self.trainer.world_size} {time.time():.2f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path.cwd() / "saved"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=GPPStrategy(max_replicas=1, num_micro_batches=4, state_dict_type="sharded", async_save=True),
        callbacks=ModelCheckpoint(folder, train_time_interval=timedelta(seconds=2)),
        default_root_dir=folder,
        max_steps=int(os.environ["STEPS"]),
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), Numbers(), ckpt_path=newest_checkpoint(folder))


if __name__ == "__main__":
    main()
