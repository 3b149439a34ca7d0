"""Losses of undivided samples and of micro-batches: what is equal, what is not, and which remedy is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.planning.assignment.manual import manual
from lightning_gpp.runtime.random import Neutral, undisturbed
from lightning_gpp.stages import build
from lightning_gpp.stages.step import Invocation
from lightning_gpp.training.checks.undivided import CutComparison, difference, few_samples


class Base(nn.Module):
    """A network with a mean loss, dropout and noise."""

    def __init__(self, *norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), *norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        noisy = x + 0.1 * torch.randn_like(x) + F.dropout(x, 0.2) * torch.rand(len(x), 1)
        return F.cross_entropy(self.net(noisy), y)


class Sum(Base):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class Contrastive(Base):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = F.normalize(self.net(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Balanced(nn.Module):
    """Only a small term of its loss depends on all samples, and only the gate's gradient shows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"main": nn.Linear(4, 3), "gate": nn.Linear(4, 3)})

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        balance = self.net["gate"](x).softmax(1).mean(0).square().sum()
        return 100 * F.cross_entropy(self.net["main"](x), y) + balance


class Mixup(Base):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(0.5 * x + 0.5 * x[torch.randperm(len(x))]), y)


class Counting(nn.Module):
    """Takes part in the result from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bias = 0, nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.bias * min(1.0, (self.calls - 1) / 10)


class TimeMajor(nn.Module):
    """Takes (time, samples, features), which are cut as if time counted samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.GRU(4, 6)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.net(batch[0])[0].square().mean()


def warning_for(
    module: nn.Module,
    sums: bool = False,
    step_size: int = 2,
    dtype: torch.dtype = torch.float32,
    inform: Callable[[str], None] = print,
) -> str:
    generator = torch.Generator().manual_seed(1)
    module = module.to(dtype)
    shape = (8, 3, 4) if isinstance(module, TimeMajor) else (8, 4)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    batch: Any = (x, torch.randint(0, 3, (8,), generator=generator))
    captured = capture_step(module, batch)
    plan = manual(captured.graph, [{"modules": ["net", "@step"]}], batch_size=8, micro_batch_size=step_size)
    undivided, parts = few_samples(plan, batch, 8)
    with undisturbed(), Neutral():
        return difference(
            CutComparison(
                module=module,
                step=build(captured, plan, module).step,
                invocation=Invocation(function=module.training_step),
                undivided=undivided,
                parts=parts,
                sums=sums,
                tolerance=1e-9 if dtype == torch.float64 else 2e-3,
                epsilon=torch.finfo(dtype).eps,
            ),
            inform,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_over_samples_is_the_same(dtype: torch.dtype) -> None:
    assert warning_for(Base(), dtype=dtype) == ""
    assert warning_for(Base(nn.LayerNorm(6)), dtype=dtype) == ""
    assert warning_for(Sum(), sums=True, dtype=dtype) == ""


@pytest.mark.parametrize(
    ("module", "sums", "message"),
    [
        (Sum(), False, "as the mean over micro-batches of 2; .*This loss is a sum over samples: set strategy"),
        (Base(), True, "as the sum over micro-batches of 2; .*This loss is a mean over samples: set strategy.loss_red"),
        (
            Base(nn.BatchNorm1d(6)),
            False,
            r"differ by [1-9].* %.*BatchNorm normalises each .* into it\. strategy\.s",
        ),
        (Contrastive(), False, "the undivided mini-batch by strategy.step=whole"),
        (Base(Counting()), False, "keeps state between its calls.*by strategy.step=whole"),
        (TimeMajor(), False, r"say which by strategy.batch_dims"),
        (Balanced(), False, r"differ by 0\.\d+ %.*strategy.step=whole"),
    ],
    ids=["sum", "mean", "BatchNorm", "contrastive", "counting", "time-major", "balanced"],
)
def test_what_differs_is_told_with_its_remedy(module: nn.Module, sums: bool, message: str) -> None:
    assert re.search(message, warning_for(module, sums))


def test_an_undivided_step_and_draws_that_mix_samples_are_not_compared() -> None:
    assert warning_for(Contrastive(), step_size=8) == ""
    told: list[str] = []
    assert warning_for(Mixup(), inform=told.append) == ""
    assert "was not compared" in told[0]
