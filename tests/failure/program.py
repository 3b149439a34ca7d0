"""A small run, with a fault of a chosen kind at a chosen moment on a chosen rank; rank 0 prints all values.

As a script it is what launchers start; the fault is in the environment variable FAULT.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn

from lightning_gpp import GPPStrategy
from lightning_gpp.cli.job import newest_checkpoint
from tests.strategy.harness import enter

STAGES: Final[dict[int, Any]] = {
    2: {"first": 0, "second": 0, "third": 1},
    3: {"first": 0, "second": 1, "third": 2},
    4: [
        {"modules": ["first"], "devices": [3]},
        {"modules": ["second"], "devices": [1, 2]},
        {"modules": ["third"], "devices": [0]},
    ],
}
"""By the number of processes."""
BATCHES: Final = 7
MICRO_BATCHES: Final = 4


def fail() -> None:
    raise ValueError("the injected fault")


def hang() -> None:
    threading.Event().wait()


KINDS: Final[dict[str, Callable[[], object]]] = {
    "raise": fail,
    "memory": lambda: torch.empty(1 << 50),
    "hang": hang,
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    **{
        name: lambda number=number: os.kill(os.getpid(), number)
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("interrupt", signal.SIGINT))
    },
}


def own_rank() -> int:
    """The rank of this process; in a forward `torch.distributed` counts pipelines."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


class Fault(L.Callback):
    """A fault that happens once on a rank: one of `KINDS`, or a signal that asks the run to stop."""

    def __init__(self, rank: int, kind: str | int, moment: str) -> None:
        self.rank, self.kind, self.moment = rank, kind, moment

    def at(self, moment: str) -> None:
        """Happen, if this is the moment and the rank."""
        if moment != self.moment or own_rank() != self.rank:
            return
        self.moment = "over"
        print(f"fault at {time.monotonic()}", flush=True)
        if isinstance(self.kind, str):
            KINDS[self.kind]()
        else:
            os.kill(os.getpid(), self.kind)
            time.sleep(0.5)  # the others hear of it before this small step ends

    def setup(self, *_: Any, **__: Any) -> None:
        self.at("set-up")

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(f"step {trainer.global_step}")

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not trainer.sanity_checking:
            self.at(f"validation {trainer.global_step} {index}")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(f"epoch {trainer.current_epoch}")

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(f"saving {trainer.global_step}")

    def on_train_end(self, *_: Any) -> None:
        self.at("end")


class Point(nn.Module):
    """Lets tensors through; here faults happen in forwards and backwards of a stage."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        fault = self.fault
        if fault is None or type(x) is not Tensor or not dist.is_initialized():
            return x
        if not self.training:
            fault.at("validating")
            return x
        self.calls += 1
        fault.at(f"forward {self.calls}")
        if x.requires_grad:
            x.register_hook(lambda gradient, moment=f"backward {self.calls}": fault.at(moment))
        return x


class Numbers:
    """A data loader that knows where it is."""

    def __init__(self) -> None:
        self.position = self.begin = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for self.position in range(begin + 1, BATCHES + 1):
            yield torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(self.position))

    def __len__(self) -> int:
        return BATCHES

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.position = state["position"] % BATCHES


class Module(L.LightningModule):
    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in ("first", "second", "third"):
            setattr(self, name, nn.Sequential(nn.Linear(6, 6).double(), Point(fault)))
        self.values: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(batch))))).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.values.append(self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell(f"trained {self.current_epoch} {batch_idx} {self.over_pipelines(outputs['loss'])}")

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.tell(f"validated after {self.global_step} {[self.over_pipelines(value) for value in self.values]}")
        self.values.clear()

    def over_pipelines(self, loss: Tensor) -> str:
        return float(self.trainer.strategy.reduce(loss, reduce_op="mean")).hex()

    def tell(self, text: str) -> None:
        if self.trainer.global_rank == 0:
            print(text, flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


def fit(
    folder: str,
    world_size: int,
    fault: Fault | None = None,
    *,
    callbacks: tuple[L.Callback, ...] = (),
    strategy: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train two epochs, from the newest checkpoint in the folder."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    given = {"stages": STAGES[world_size], "num_micro_batches": MICRO_BATCHES, "failure_timeout": 60.0}
    defaults = {"max_epochs": 2, "val_check_interval": 3, "limit_val_batches": 3}
    trainer = L.Trainer(
        strategy=GPPStrategy(**{**given, **(strategy or {})}, self_check=False),
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        callbacks=[*([fault] if fault else []), *callbacks],
        default_root_dir=folder,
        **{**defaults, **options},
    )
    print(f"started pid {os.getpid()}", flush=True)
    trainer.fit(Module(fault), Numbers(), Numbers(), ckpt_path=newest_checkpoint(folder))
    print("complete", flush=True)


def as_torchrun_would(rank: int, world_size: int, port: int, folder: str, fault: tuple[Any, ...], more: Any) -> None:
    enter(rank, world_size, port)
    signal.signal(signal.SIGUSR2, lambda number, frame: print("handed on", flush=True))
    fit(folder, world_size, Fault(*fault) if fault else None, **more)


if __name__ == "__main__":
    fit(str(Path.cwd()), 2, Fault(*json.loads(os.environ["FAULT"])), strategy={"failure_timeout": 12.0})
