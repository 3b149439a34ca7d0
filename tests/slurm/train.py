"""Trains the module of the tests of preemption on all tasks of a job; the working directory is shared.

From the environment: STEP_SECONDS of a training or validation step, SAVE_SECONDS of a checkpoint, EPOCHS, SAVE_EVERY
so many steps, if at all.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.failure.program import fit


class Pace(L.Callback):
    """Makes steps and checkpoints take time, and tells when a validation step and a checkpoint begin."""

    def __init__(self, step: float, save: float) -> None:
        self.step, self.save = step, save

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        time.sleep(self.step)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        tell(trainer, "validating")
        time.sleep(self.step)

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        tell(trainer, "saving")
        time.sleep(self.save)


def tell(trainer: L.Trainer, text: str) -> None:
    if trainer.is_global_zero and not trainer.sanity_checking:
        print(text, flush=True)


def main() -> None:
    nodes, world_size = number("GROUP_WORLD_SIZE", "SLURM_NNODES"), number("WORLD_SIZE", "SLURM_NTASKS")
    callbacks: list[L.Callback] = [Pace(seconds("STEP_SECONDS"), seconds("SAVE_SECONDS"))]
    if every := int(os.environ.get("SAVE_EVERY", "0")):
        callbacks.append(ModelCheckpoint(Path.cwd(), every_n_train_steps=every))
    fit(
        str(Path.cwd()),
        world_size,
        callbacks=tuple(callbacks),
        devices=world_size // nodes,
        num_nodes=nodes,
        max_epochs=int(os.environ.get("EPOCHS", "2")),
    )


def number(of_torchrun: str, of_slurm: str) -> int:
    return int(os.environ.get(of_torchrun) or os.environ[of_slurm])


def seconds(name: str) -> float:
    return float(os.environ.get(name, "0"))


if __name__ == "__main__":
    main()
