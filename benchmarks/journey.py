"""Counts the files that a reader passes through in a training step, and in making a plan.

    python -m benchmarks.journey

The step is that of rank 0 of three, in a steady state, from the hook before the mini-batch to the one after it: four
micro-batches of the two-tower example, with each tower on a device of its own. The plan is found by the partitioner
`auto` for the same model and number of devices, after the capture.

A file counts if one of its functions runs. A change of file is a call or return of one of the package's functions that
follows one in another file.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.multiprocessing as multiprocessing
from lightning.fabric.plugins.environments.lightning import find_free_network_port

import lightning_gpp
from gpp_examples.two_tower import CaptionedDigits, TwoTower
from lightning_gpp.capture import capture_step
from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Request, best_plan

NUM_RANKS = 3
STEADY = 5
"""The mini-batch that is counted; earlier ones create what later ones reuse, and compare the loss with itself."""

STAGES = [
    {"modules": ["image_tower"], "devices": [2]},
    {"modules": ["text_tower"], "devices": [1]},
    {"modules": ["head", "@step"], "devices": [0]},
]
ROOT = f"{Path(lightning_gpp.__file__).parent}{os.sep}"


class Journey:
    """The files of the package in the order in which their functions were called and returned."""

    def __init__(self) -> None:
        self.passed: list[str] = []

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(ROOT):
            self.passed.append(code.co_filename.removeprefix(ROOT))

    def row(self, name: str) -> str:
        changes = sum(before != after for before, after in pairwise(self.passed))
        return f"| {name} | {len(set(self.passed))} | {changes} |"


class Steady(L.Callback):
    """Counts one mini-batch."""

    def __init__(self) -> None:
        self.journey = Journey()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEADY:
            self.journey.start()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.journey.stop()


def step(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    steady = Steady()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=lightning_gpp.GPPStrategy(stages=STAGES, num_micro_batches=4),
        max_steps=STEADY + 2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[steady],
    )
    trainer.fit(TwoTower(), CaptionedDigits(batch_size=16))
    if rank == 0:
        print(steady.journey.row("a training step"))


def plan() -> None:
    data = CaptionedDigits(batch_size=16)
    data.setup("fit")
    captured = capture_step(TwoTower(), next(iter(data.train_dataloader())))
    request = Request(cluster=preset_cluster("cpu_host", 1, NUM_RANKS), batch_size=captured.batch_size, seconds=2.0)
    journey = Journey()
    journey.start()
    best_plan("auto", captured.graph, request)
    journey.stop()
    print(journey.row("a plan"))


def main() -> None:
    print("| | files | changes of file |\n|---|---|---|", flush=True)
    multiprocessing.spawn(step, (find_free_network_port(),), nprocs=NUM_RANKS)
    plan()


if __name__ == "__main__":
    main()
