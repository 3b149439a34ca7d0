"""Random generators in attributes of the module go on as on one device: behind the network, and in a whole step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gpp.capture.kept import unmoved
from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Behind(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.before = SimpleNamespace(python=random.Random(0), numpy=np.random.RandomState(1))
        self.behind, self.torch = np.random.default_rng(2), torch.Generator().manual_seed(3)

    def noised(self, x: Tensor) -> Tensor:
        return x

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step([self.noised(batch[0]), *batch[1:]], batch_idx)
        return {**output, "loss": output["loss"] * (1 + self.behind.random())}


class InFront(Behind):
    def noised(self, x: Tensor) -> Tensor:
        return (1 + self.before.python.random() + self.before.numpy.rand()) * x


class ByTorch(Behind):
    def noised(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.torch, dtype=x.dtype)


def drawn(kind: type[Behind], strategy: Any, devices: int) -> list[float]:
    torch.manual_seed(0)
    module = kind().double()
    harness.trainer(strategy, devices, limit_val_batches=0).fit(module, harness.loader(), harness.loader())
    return module.losses


def drawn_in_stages(rank: int) -> list[list[float]]:
    whole = [drawn(kind, harness.strategy(step="whole"), 2) for kind in KINDS]
    return [drawn(Behind, harness.strategy(num_micro_batches=1), 2), *whole]


KINDS = (InFront, ByTorch)


def test_steps_draw_what_they_draw_on_one_device() -> None:
    expected = [drawn(kind, "auto", 1) for kind in (Behind, *KINDS)]
    for found in harness.run(2, drawn_in_stages):
        for losses, others in zip(expected, found, strict=True):
            assert others == pytest.approx(losses, rel=1e-12)


def test_generators_are_restored() -> None:
    sources = np.random.default_rng(0), np.random.RandomState(1), random.Random(2), torch.Generator()
    with unmoved(sources):
        first = _draw(*sources)
    assert _draw(*sources) == first


def _draw(one: np.random.Generator, two: np.random.RandomState, three: random.Random, four: torch.Generator) -> Any:
    return one.random(), two.rand(), three.random(), torch.rand((), generator=four).item()
