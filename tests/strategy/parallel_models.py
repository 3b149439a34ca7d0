"""Modules that divide themselves among the processes of a device, and their data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HIDDEN, SAMPLES = 8, 12, 22


class FeedForward(nn.Module):
    """Two linear layers between which each member has a part of the values; a norm is on every member."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def plan_of(path: str) -> dict[str, Any]:
    return {f"{path}.up": ColwiseParallel(), f"{path}.down": RowwiseParallel()}


class Tower(pl.LightningModule):
    """A chain of blocks whose head collects its results from the members."""

    blocks = 2

    def __init__(self, dropout: float = 0.0, divides: bool = True) -> None:
        super().__init__()
        self.divides = divides
        self.layers = nn.ModuleList(FeedForward(dropout) for _ in range(self.blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.divides and self.device_mesh is not None:
            parallelize_module(self, self.device_mesh["tensor_parallel"], self.parallel_plan())

    def parallel_plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
        for number in range(self.blocks):
            plan |= plan_of(f"layers.{number}")
        return plan

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


class Branches(Tower):
    """Two blocks side by side, whose sum goes to a third."""

    blocks = 3

    def forward(self, x: Tensor) -> Tensor:
        left, right, top = self.layers
        return self.head(top(left(x) + right(x)))


def make(kind: type[Tower] = Tower, **kwargs: Any) -> Tower:
    torch.manual_seed(0)
    return kind(**kwargs).double()


def loader(samples: int = SAMPLES, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator)), batch_size=batch_size)
