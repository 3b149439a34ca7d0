"""Hooks at the ends of epochs read on all ranks what steps and forwards have changed in parts of the module."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Counting(nn.Module):
    """Keeps the number of its calls, in front of the network or in a stage of its own."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Identity() if layer is None else layer
        self.calls, self.kept, self.mean = 0, {"calls": 0}, None

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        self.kept["calls"] += 1
        out: Tensor = self.layer(values)
        self.mean = out.detach().mean()
        return out


class Noting(nn.Module):
    """A loss that keeps numbers, lists and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.history, self.recent = 0, list[float](), deque[float](maxlen=2)
        self.running = torch.zeros(())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(logits, target)
        self.number += 1
        self.history += [loss.item()] * 30  # soon a list of more than 64
        self.recent.append(loss.item())
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss


class Keeping(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.before, self.loss_of = Counting(self.left), Counting(), Noting()
        self.right.flag = ""
        self.hits = self.all = 0
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.right.flag = f"{self.right.flag}{batch_idx}"
        a, b, y = batch
        return self.loss_of(self(self.before(a), b), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.hits += int((self(*batch[:2]).argmax(1) == batch[2]).sum())
        self.all += len(batch[2])

    def on_train_batch_end(self, *_: Any) -> None:  # type: ignore[override]
        pass

    def on_validation_epoch_end(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / self.loss_of.number

    def on_train_epoch_end(self) -> None:
        loss, text = self.loss_of, self.right.flag
        self.read += [loss.number, sum(loss.history), sum(loss.recent), float(loss.running), text]
        self.read += [self.before.calls, self.before.kept["calls"]]
        self.log("mean", self.left.mean)


class Reading(pl.Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("accuracy", module.hits / module.all)
        module.read.append((module.hits, module.all))
        module.hits = module.all = 0


def kept(strategy: Any, devices: int) -> tuple[list[Any], float]:
    torch.manual_seed(0)
    module = Keeping().double()
    trainer = harness.trainer(strategy, devices)
    trainer.callbacks.append(Reading())
    trainer.fit(module, harness.loader(), harness.loader(10, seed=2))
    return module.read, float(trainer.callback_metrics["mean"])


def kept_in_stages(rank: int) -> tuple[list[Any], float]:
    return kept(harness.strategy(num_micro_batches=1), 2)


def test_all_ranks_read_what_was_kept() -> None:
    read, mean = kept("auto", 1)
    assert len(read) > 10
    for found, logged in harness.run(2, kept_in_stages):
        assert logged == pytest.approx(mean, rel=1e-10)
        assert len(found) == len(read)
        for one, other in zip(read, found, strict=True):
            assert other == (one if isinstance(one, str) else pytest.approx(one, rel=1e-10))


class InTraining(Counting):
    def forward(self, values: Tensor) -> Tensor:
        before = self.calls
        out = super().forward(values)
        self.calls = before + self.training
        return out


class Beginning(TwoTowers):
    """Counts anew from validation on, in which nothing is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.read = InTraining(self.left), list[int]()

    def on_validation_epoch_start(self) -> None:
        self.read.append(-1)
        self.left.calls = 0

    def on_train_epoch_end(self) -> None:
        self.read.append(self.left.calls)

    def on_train_batch_end(self, *_: Any) -> None:  # type: ignore[override]
        pass


def begun(strategy: Any, devices: int) -> list[int]:
    torch.manual_seed(0)
    module = Beginning().double()
    trainer = harness.trainer(strategy, devices, num_sanity_val_steps=0)
    trainer.fit(module, harness.loader(), harness.loader(10, seed=2))
    return module.read


def begun_in_stages(rank: int) -> list[int]:
    return begun(harness.strategy(num_micro_batches=1), 2)


def test_what_hooks_set_since_counts() -> None:
    assert harness.run(2, begun_in_stages) == [begun("auto", 1)] * 2 == [[-1, 0, -1, 0]] * 2
