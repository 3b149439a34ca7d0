"""A small two-tower module and its data, trainers for it, and processes to run them in."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpp import GPPStrategy
from tests import distributed

distributed.preload(
    "lightning.pytorch", "torchmetrics.classification", "tests.strategy.harness", "tests.strategy.captured"
)

STAGES = [
    {"modules": ["left"], "devices": [1]},
    {"modules": ["right", "head", "@step"], "devices": [0]},
]


class TwoTowers(pl.LightningModule):
    """Two towers, a head, an unused module, a metric object, several kinds of logging, values kept for an epoch."""

    def __init__(self, width: int = 6, lr: float = 0.05) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.BatchNorm1d(width, track_running_stats=False))
        self.head = nn.Linear(2 * width, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.lr = lr
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(a), self.right[:2](b)], dim=1))

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, y = batch
        logits = self(a, b)
        return nn.functional.cross_entropy(logits, y), logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        loss, logits = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", logits.detach().max(), reduce_fx="max")
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, logits = self.loss(batch)
        self.accuracy(logits, batch[2])
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.accuracy)
        self.seen.append(loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits = self.loss(batch)
        self.log_dict({"test_loss": loss, "test_spread": logits.std()})

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        assert len(outputs["logits"]) == len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_kept", torch.stack(self.seen).mean())
        self.seen.clear()

    def on_train_epoch_end(self) -> None:
        self.metrics.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        decay = [p for n, p in self.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def make_module(seed: int = 0, **kwargs: Any) -> TwoTowers:
    torch.manual_seed(seed)
    return TwoTowers(**kwargs).double()


def make_data(samples: int = 22, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    b = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(a, b, torch.randint(0, 3, (samples,), generator=generator))


def loader(samples: int = 22, batch_size: int = 8, shuffle: bool = False, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(make_data(samples, seed), batch_size=batch_size, shuffle=shuffle)


def trainer(strategy: Any = "auto", devices: int = 1, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **kwargs})


def strategy(**kwargs: Any) -> GPPStrategy:
    return GPPStrategy(
        **{"stages": STAGES, "num_micro_batches": 4, "failure_timeout": 60.0, "timeout": 120.0, **kwargs}
    )


def state_bytes(optimizer: Optimizer) -> int:
    """Memory of an optimizer's state on this rank, in bytes."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = distributed.PATIENCE) -> list[Any]:
    """`fn(rank, *args)` in processes that a trainer takes for its own; results by rank."""
    return distributed.run_distributed(world_size, _in_environment, world_size, fn, args, timeout=timeout)


def run_each(world_size: int, fn: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """`fn(rank, *case)` for every case in the same processes; for each case the results by rank."""
    by_rank = run(world_size, distributed.each, fn, cases, timeout=distributed.patience(cases))
    return [list(found) for found in zip(*by_rank, strict=True)]


def enter(rank: int, world_size: int, port: int) -> None:
    """Take part in a job as torchrun's processes do."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0")
    os.environ.update(TORCHELASTIC_RUN_ID="test")
    warnings.simplefilter("ignore")


def _in_environment(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return fn(rank, *args)
