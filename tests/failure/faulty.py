"""A small run with a fault of a chosen kind at a chosen moment on a chosen rank, and the launchers that start it.

As a script it is what launchers start; the fault is in the environment variable FAULT.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import GPPStrategy
from lightning_gpp.cli.job import newest_checkpoint
from tests.failure import preempted
from tests.failure.fit_script import own_rank

WORLD_SIZE: Final = 3
MICRO_BATCHES: Final = 4
BATCHES: Final = 8
EPOCHS: Final = 2
FAILURE_TIMEOUT: Final = 10.0
STEADY: Final = 10
"""The mini-batch of training in whose forward or backward a fault happens, in the second epoch; two steps after a
checkpoint."""


class Fault:
    """A fault that happens once."""

    def __init__(self, kind: str, moment: str, rank: int) -> None:
        self.kind, self.moment, self.rank = kind, moment, rank

    @classmethod
    def of_environment(cls) -> Fault | None:
        given = os.environ.get("FAULT")
        return cls(*json.loads(given)) if given else None

    def at(self, moment: str, rank: int) -> None:
        """Happen, if this is the moment and the rank."""
        if moment == self.moment and rank == self.rank:
            self.moment = "over"
            os.write(1, f"\nfault at {time.monotonic()}\n".encode())
            KINDS[self.kind]()


def fail() -> None:
    raise ValueError("the injected fault")


def allocate() -> None:
    torch.empty(1 << 50)


def fill_the_disk() -> None:
    """From now on files cannot grow; output goes to a pipe."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def to_oneself(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


KINDS: Final[dict[str, Callable[[], object]]] = {
    "kill": to_oneself(signal.SIGKILL),
    "stop": to_oneself(signal.SIGSTOP),
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    "raise": fail,
    "memory": allocate,
    "interrupt": to_oneself(signal.SIGINT),
    "interrupt all": lambda: os.killpg(os.getpgrp(), signal.SIGINT),
    "terminate": to_oneself(signal.SIGTERM),
    "worker raises": fail,
    "worker killed": to_oneself(signal.SIGKILL),
    "disk full": fill_the_disk,
}
MOMENTS: Final = ("import", "start-up", "planning", "warm-up", "steady", "backward", "validation", "saving", "end")


class Point(nn.Module):
    """Lets tensors through; here the fault happens in forwards and backwards of a stage."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        fault = self.fault
        if fault is None or type(x) is not Tensor or not dist.is_initialized():
            return x
        rank = own_rank()
        if not self.training:
            fault.at("validation", rank)
            return x
        self.calls += 1
        first, steady = self.calls == 1, self.calls == STEADY * MICRO_BATCHES + 2
        if first or steady:
            fault.at("warm-up" if first else "steady", rank)
        if steady and x.requires_grad:
            x.register_hook(lambda gradient: fault.at("backward", rank))
        return x


class Samples(Dataset[Tensor]):
    """Its workers fail while they load a mini-batch, on the rank that has any."""

    def __init__(self, fault: Fault | None) -> None:
        self.data = torch.randn(8 * BATCHES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        self.fault = fault

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        if self.fault is not None and index == 8 * (STEADY - BATCHES) and torch.utils.data.get_worker_info():
            self.fault.at("loading", self.fault.rank)
        return self.data[index]


class Module(preempted.Module):
    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault = fault
        for name in ("first", "second", "third"):
            setattr(self, name, nn.Sequential(getattr(self, name), Point(fault)))

    def at(self, moment: str) -> None:
        if self.fault is not None:
            self.fault.at(moment, self.trainer.global_rank)

    def setup(self, stage: str) -> None:
        self.at("start-up")

    def configure_optimizers(self) -> Any:
        self.at("planning")
        return super().configure_optimizers()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step == STEADY:
            self.at("saving")

    def on_train_end(self) -> None:
        self.at("end")


def fit(folder: str) -> None:
    """Train two epochs in a folder, from the newest checkpoint there."""
    os.chdir(folder)
    fault = Fault.of_environment()
    if fault is not None:
        fault.at("import", own_rank())
    torch.manual_seed(1)
    trainer = L.Trainer(
        strategy=GPPStrategy(
            stages=preempted.STAGES[WORLD_SIZE],
            num_micro_batches=MICRO_BATCHES,
            mini_batch="shared",
            failure_timeout=FAILURE_TIMEOUT,
            self_check=False,
        ),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    workers = fault is not None and fault.kind.startswith("worker")
    data = DataLoader(Samples(fault), batch_size=8, num_workers=int(workers))
    validation = DataLoader(Samples(None), batch_size=8)
    trainer.fit(Module(fault), data, validation, ckpt_path=newest_checkpoint(folder))
    print("complete", flush=True)


def fit_as_worker(folder: str) -> None:
    """Without the handlers that a fork has from its agent; a worker of torchrun is a fresh process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.write(1, b"\nbegan\n")
    try:
        fit(folder)
    except KeyboardInterrupt:  # which torch takes for a regular end of a function
        os._exit(130)


def under_torchrun(folder: str, fault: tuple[str, str, int] | None, output: str, port: int) -> None:
    """Run as torchrun does, by its agent, but without importing everything in each process anew."""
    os.setsid()
    redirect_through_a_pipe(output)
    os.environ["FAULT"] = json.dumps(fault) if fault else ""
    torch.set_num_threads(1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORLD_SIZE,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, fit_as_worker)(folder)


def redirect_through_a_pipe(output: str) -> None:
    """Output of this process and its children goes to a file, which a limit of their file size does not concern."""
    with open(output, "ab") as stream:
        copies = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=stream, start_new_session=True)
    assert copies.stdin is not None
    os.dup2(copies.stdin.fileno(), 1)
    os.dup2(copies.stdin.fileno(), 2)
    copies.stdin.close()


if __name__ == "__main__":
    fit(str(Path.cwd()))
