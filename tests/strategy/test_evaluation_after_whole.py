"""Evaluations after a training step as a whole, whose stages need not be a pipeline for them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategy import harness

STAGES = [{"modules": ["head"], "devices": [1]}, {"modules": ["body", "@step"], "devices": [0]}]
"""A step on micro-batches would go from device 0 to 1 and back to the same stage."""


class ByHand(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.head(self.body(batch[0])).square().mean())
        optimizer.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.head(self.body(batch[0])).square().mean())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.body(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated(devices: int) -> tuple[list[float], Tensor]:
    trainer = harness.trainer(harness.strategy(stages=STAGES) if devices > 1 else "auto", devices, max_epochs=1)
    model, samples = (
        ByHand().double(),
        torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    data = DataLoader(TensorDataset(samples), batch_size=8)
    trainer.fit(model, data)
    losses = [loop(model, data, verbose=False)[0]["loss"] for loop in (trainer.validate, trainer.test)]
    predicted = trainer.predict(model, data)
    return losses, torch.cat(predicted) if predicted and predicted[0] is not None else torch.zeros(0)


def evaluated_in_stages(rank: int) -> tuple[list[float], Tensor]:
    return evaluated(2)


@pytest.mark.filterwarnings("ignore")
def test_evaluations_after_training_by_hand_give_the_numbers_of_one_process() -> None:
    expected, outputs = evaluated(1)
    found = harness.run(2, evaluated_in_stages)
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found[0][1], outputs, rtol=1e-12, atol=1e-14)
