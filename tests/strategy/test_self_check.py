"""The self-check in real pipelines: what it accepts, what it refuses, and what it warns of."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from tests.strategy import harness
from tests.strategy.harness import loader

TWO = [{"modules": ["left"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]
REPLICATED = [{"modules": ["left"], "devices": [1, 2]}, {"modules": ["head", "@step"], "devices": [0]}]


class ScaledOnOtherRanks(Function):
    """The identity, with a gradient that depends on the rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (1 + ctx.rate * int(os.environ["LOCAL_RANK"])), None


class Wrong(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return ScaledOnOtherRanks.apply(super().forward(x), 1.0)


class Single(nn.Linear):
    """Computes in float32 inside of a model in float64; its gradient is off by `rate` on other ranks."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return ScaledOnOtherRanks.apply(super().forward(x).float().softmax(1), self.rate).to(x.dtype)


class WrongSingle(Single):
    rate = 0.01


MIDDLES = {"wrong": Wrong, "float32": Single, "wrong in float32": WrongSingle}


class Module(pl.LightningModule):
    """A classifier with a loss of a given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        other = nn.BatchNorm1d(6) if kind == "BatchNorm" else nn.Dropout(0.4)
        middle = MIDDLES[kind](6, 6) if kind in MIDDLES else other
        self.left = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.kind, self.kept = kind, list[Tensor]()
        if kind == "hook":
            self.left.register_forward_hook(lambda module, args, result: self.kept.append(result))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.clear()
        logits = self.head(self.left(batch[0])) + sum(kept[:, :3] for kept in self.kept)
        labels = batch[2].where(batch[0][:, 0] > 0, -100) if self.kind == "masked" else batch[2]
        loss = F.cross_entropy(logits, labels, reduction="sum" if self.kind == "sum" else "mean")
        return loss * float("nan") if self.kind == "nan" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def warnings_of(rank: int, kind: str, stages: Any, **options: Any) -> list[str]:
    strategy = harness.strategy(stages=stages, num_micro_batches=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(strategy, 1 + max(stages[0]["devices"]), max_epochs=1, limit_train_batches=1)
        trainer.fit(Module(kind).double(), loader())
    return [str(warning.message) for warning in caught if "undivided" in str(warning.message)]


@pytest.mark.parametrize("kind", ["wrong", "wrong in float32"])
def test_a_wrong_gradient_is_refused_with_its_stage(kind: str) -> None:
    with pytest.raises(AssertionError, match=r"SelfCheckError: .*parameters differ, in stages \['left'\], first"):
        harness.run(2, warnings_of, kind, TWO)


def test_a_loss_that_is_not_finite_is_no_matter_of_micro_batches() -> None:
    (told,), _ = harness.run(2, warnings_of, "nan", TWO)
    assert re.match(r"The loss of the first \d samples is nan, undivided, too\. Look for a division by zero", told)
    assert "micro-batches" not in told


def told_of_both(rank: int) -> list[list[str]]:
    return [warnings_of(rank, kind, REPLICATED) for kind in ("float32", "BatchNorm")]


def test_replicas_round_float32_without_a_word_and_batch_norm_is_told() -> None:
    """Replicas compute fewer samples at once than the undivided model, and float32 rounds these differently."""
    (rounded, told), *others = harness.run(3, told_of_both)
    assert rounded == []
    assert "BatchNorm normalises each micro-batch by itself" in told[0]
    assert others == [[[], []]] * 2
