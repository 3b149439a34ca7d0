"""A small module trained as a pipeline of two or three stages, with a fault on a chosen rank in a chosen phase.

A script for launchers (the environment chooses), and a function for processes that a test starts itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy

STAGES = {3: {"first": 0, "second": 1, "third": 2}, 2: {"first": 0, "second": 0, "third": 1}}
FAILURE_TIMEOUT = 12.0
"""Seconds. A stopped rank counts as stopped after a fifth of it."""
MICRO_BATCHES, MINI_BATCHES = 4, 8
CALLS_BEFORE = {
    "warm-up": 0,
    "steady": 2 * MICRO_BATCHES + 1,
    "drain": MINI_BATCHES * MICRO_BATCHES - 1,
    "validation": 0,
}
"""Forwards of a stage, in the fault's mode, before the fault: warm-up is the first, steady in the third mini-batch. In
the drain there are only backwards: that of the last forward fails."""


RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
"""Variables with the rank of a process, of torchrun, srun and Lightning's launcher."""


def inject(fault: str) -> None:
    print(f"fault at {time.monotonic()}", flush=True)
    if fault == "raise":
        raise ValueError("the injected fault")
    if fault == "exit":
        os._exit(0)
    if fault == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def own_rank() -> int:
    """The rank of this process; in a forward `torch.distributed` counts pipelines."""
    return int(next((os.environ[name] for name in RANKS if os.environ.get(name)), "0"))


class Block(nn.Module):
    """A layer that fails when the environment says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        phase = os.environ.get("FAULT_PHASE", "")
        fails = phase and type(x) is Tensor and dist.is_initialized() and self.is_time(phase)
        if fails and phase != "drain":
            inject(os.environ["FAULT"])
        y = torch.relu(self.linear(x))
        if fails:
            y.register_hook(lambda gradient: inject(os.environ["FAULT"]))
        return y

    def is_time(self, phase: str) -> bool:
        """Whether this forward is the one that fails."""
        here = self.training == (phase != "validation") and own_rank() == int(os.environ["FAULT_RANK"])
        self.calls += here
        return here and self.calls == CALLS_BEFORE[phase] + 1


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.third(self.second(self.first(x))), y)
        self.log(name, loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: str, world_size: int, callbacks: list[L.Callback] | None = None) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    samples = 8 * MINI_BATCHES
    data = DataLoader(TensorDataset(torch.randn(samples, 8), torch.rand(samples, 8)), batch_size=8)
    trainer = L.Trainer(
        strategy=GPPStrategy(
            stages=STAGES[world_size],
            num_micro_batches=MICRO_BATCHES,
            weights=os.environ.get("WEIGHTS", "synchronous"),
            failure_timeout=FAILURE_TIMEOUT,
            timeout=float(os.environ.get("TIMEOUT", "1800")),
            self_check=False,
        ),
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    print(f"pid {os.getpid()} rank {trainer.global_rank}", flush=True)
    trainer.fit(Module(), data, data)


if __name__ == "__main__":
    fit(str(Path.cwd()), world_size=2)
