"""A small module that is trained and validated, and is asked to stop at a chosen moment; rank 0 prints all values."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GPPStrategy

STAGES: dict[int, Any] = {
    2: {"first": 0, "second": 0, "third": 1},
    3: {"first": 0, "second": 1, "third": 2},
    4: [
        {"modules": ["first"], "devices": [3]},
        {"modules": ["second"], "devices": [1, 2]},
        {"modules": ["third"], "devices": [0]},
    ],
}
"""By the number of processes."""
BATCHES = 7


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
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(6, 6).double() for _ in range(3))
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


class Asked(L.Callback):
    """Sends the signal to this rank at the chosen moment."""

    def __init__(self, rank: int, number: int, moment: str) -> None:
        self.rank, self.number, self.moment = rank, number, moment

    def at(self, trainer: L.Trainer, moment: str) -> None:
        if moment == self.moment and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)
            time.sleep(0.5)  # the others hear of it before this small step ends

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.at(trainer, "set-up")

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, f"step {trainer.global_step}")

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not trainer.sanity_checking:
            self.at(trainer, f"validation {trainer.global_step} {index}")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, f"epoch {trainer.current_epoch}")

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "end")


def shuffled() -> DataLoader[Tensor]:
    """An ordinary loader, whose mini-batches have 8 samples."""
    data = torch.randn(8 * BATCHES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch_size=8, shuffle=True)  # type: ignore[arg-type]


def fit(
    folder: str,
    world_size: int,
    *callbacks: L.Callback,
    ckpt_path: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    data: Callable[[], Any] = Numbers,
    **options: Any,
) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    defaults = {
        "devices": world_size,
        "max_epochs": 2,
        "val_check_interval": 3,
        "limit_val_batches": 3,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(
        strategy=GPPStrategy(
            **{"stages": STAGES[world_size], "num_micro_batches": 4, **(strategy or {})},
            failure_timeout=60.0,
            self_check=False,
        ),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
        **{**defaults, **options},
    )
    print("started", flush=True)
    trainer.fit(Module(), data(), data(), ckpt_path=ckpt_path)
    print("complete", flush=True)


def environment(rank: int, world_size: int, port: int) -> None:
    """Set the variables that torchrun sets."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    places |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")


def as_torchrun_would(rank: int, world_size: int, port: int, folder: str, asked: tuple[Any, ...], more: Any) -> None:
    environment(rank, world_size, port)
    signal.signal(signal.SIGUSR2, lambda number, frame: print("handed on", flush=True))
    fit(folder, world_size, *([Asked(*asked)] if asked else []), ckpt_path=newest(folder), **more)


def newest(folder: str) -> str | None:
    return str(max(Path(folder).glob("hpc_ckpt_*.ckpt"), default="")) or None
