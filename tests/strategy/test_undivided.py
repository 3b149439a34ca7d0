"""Steps that cannot be captured run as a whole where they need no second device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategy import harness
from tests.strategy.harness import loader


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.first(batch[0]).tanh()), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ReadsValues(Plain):
    """Reads a value of its network, and uses a parameter without a module."""

    validation_step = None  # Lightning's way to switch validation off

    def training_step(self, *args: Any) -> Tensor:
        loss = self.loss(args[0]) * self.scale
        return loss * 2 if loss.item() > 1 else loss * args[1]


class Functional(Plain):
    """Calls no module."""

    def training_step(self, batch: Any, batch_idx: int, factor: float = 2.0) -> Tensor:
        hidden = F.linear(batch[0], self.first.weight, self.first.bias).tanh()
        return factor * F.cross_entropy(F.linear(hidden, self.head.weight, self.head.bias), batch[2])


class ByHand(Functional):
    """Calls no module either, and steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss))

    def on_train_batch_end(self, *_: Any) -> None:
        """Its losses are known."""


class Quasi(Plain):
    """Its optimizer evaluates the step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


class Skipping(ReadsValues):
    """Skips every second step."""

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args) if args[1] % 2 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else 0.0)


def fit(rank: int, kind: type[Plain], gpp: bool) -> list[float]:
    module = kind().double()
    harness.trainer(harness.strategy(stages=None, num_micro_batches=None) if gpp else "auto", 1).fit(module, loader())
    return module.losses


KINDS = (ReadsValues, Functional, ByHand, Quasi, Skipping)


def fit_all(rank: int) -> list[tuple[list[float], list[float]]]:
    return [(fit(rank, kind, True), fit(rank, kind, False)) for kind in KINDS]


def test_one_process_trains_as_without_the_strategy() -> None:
    (found,) = harness.run(1, fit_all)
    for kind, (ours, plain) in zip(KINDS, found, strict=True):
        assert len(plain) > 2, kind
        assert ours == pytest.approx(plain, rel=1e-12), kind
