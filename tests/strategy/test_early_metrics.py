"""Steps that update metrics before their last call of a module run as a whole, and count each sample once."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.strategy import harness


class Model(pl.LightningModule):
    """Its metrics get values of another device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.mean, self.total, self.last = MeanMetric(), SumMetric(), SumMetric()
        self.values = [CatMetric()]
        self.bundle = MetricCollection({"sum": SumMetric(), "max": MaxMetric()})
        self.found: list[list[float]] = []

    def update(self, values: Tensor) -> None:
        self.mean.update(values[:, 0])
        self.values[0].update(values[:, 0])
        self.log("total", 2 * self.total(values.sum()), reduce_fx="sum")
        self.log_dict(self.bundle(values[:, 1]), reduce_fx="max")

    def step(self, batch: list[Tensor]) -> Tensor:
        hidden = self.first(batch[0]).tanh()
        self.update(hidden)
        loss = (self.second(hidden * 2) - batch[1]).square().mean()
        self.last.update(loss * len(batch[0]))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch)

    def end(self) -> None:
        metrics = [self.mean, self.total, self.last]
        numbers = [metric.compute() for metric in metrics] + list(self.bundle.compute().values())
        self.found.append([*map(float, numbers), float(self.mean.weight), float(len(self.values[0].compute()))])
        for metric in (*metrics, *self.values, self.bundle):
            metric.reset()

    def on_validation_epoch_start(self) -> None:
        self.end()

    def on_validation_epoch_end(self) -> None:
        self.end()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, width, dtype=torch.float64, generator=generator) for width in (4, 2))
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trained(devices: int) -> list[list[float]]:
    several = harness.strategy(stages={"first": 1, "second": 0}, num_micro_batches=4)
    trainer = harness.trainer(several if devices > 1 else "auto", devices, num_sanity_val_steps=0, max_epochs=1)
    model = Model().double()
    trainer.fit(model, loader(), loader())
    return [*model.found, [float(trainer.callback_metrics["total"])]]


def trained_in_stages(rank: int) -> list[list[float]]:
    return trained(2)


def test_every_sample_counts_once() -> None:
    expected = trained(1)
    for found in harness.run(2, trained_in_stages):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)  # metrics count in float32
