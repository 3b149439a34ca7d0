"""Modules that keep something for later calls of a step, which a step sets: caches, flags, hidden states."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import CaptureError
from tests.strategy import harness


class Remembering(nn.Module):
    """Adds what it has seen, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.uses, self.seen = False, None
        self.register_buffer("cache", torch.zeros(8, 4), persistent=False)

    def forward(self, x: Tensor, filled: dict[str, Tensor] | None = None) -> Tensor:
        x = self.linear(x)
        if self.uses:
            x = x if self.seen is None else x + self.seen
            self.seen = x.detach()
        if filled is not None:
            x = x + filled.get("x", 0.0)
            filled["x"] = x
        return x


class Cached(Remembering):
    """Fills a buffer of a place for each sample."""

    def forward(self, x: Tensor, filled: Any = None) -> Tensor:
        x = self.linear(x)
        if not self.training:
            x = x + self.cache[: len(x)]
            self.cache[: len(x)] = x.detach()
        return x


class Model(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), Cached() if kind == "buffer" else Remembering()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.head(self.body(batch[0])) - batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        filled = {} if self.kind == "argument" else None
        self.head.uses, self.head.seen = self.kind in ("attribute", "flag"), None
        self.head.cache.zero_()
        x = self.body(batch[0])
        for _ in range(1 if self.kind == "flag" else 3):
            x = self.head(x, filled)
        self.head.uses, self.head.seen = False, None
        self.log("loss", x.square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trained(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.head.uses, self.head.seen = True, None
        return super().training_step(batch, batch_idx)


STAGES = [{"modules": ["body"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]
KINDS = ("attribute", "flag", "argument", "buffer")


def evaluated(strategy: Any, devices: int, kind: str) -> float:
    made, module = harness.trainer(strategy, devices, max_epochs=1), Model(kind).double()
    made.fit(module, harness.loader(16), harness.loader(16))
    return float(made.callback_metrics["loss"])


def evaluated_in_stages(rank: int) -> list[float]:
    return [evaluated(harness.strategy(stages=STAGES, num_micro_batches=2), 2, kind) for kind in KINDS]


def test_evaluation_gives_the_numbers_of_one_process() -> None:
    expected = [evaluated("auto", 1, kind) for kind in KINDS]
    for found in harness.run(2, evaluated_in_stages):
        assert found == pytest.approx(expected, rel=1e-12)


def refused(rank: int) -> str:
    made = harness.trainer(harness.strategy(stages=STAGES, num_micro_batches=2), 2)
    with pytest.raises(CaptureError) as raised:
        made.fit(Trained("attribute").double(), harness.loader(16))
    return str(raised.value)


def test_training_with_it_is_refused() -> None:
    for text in harness.run(2, refused):
        assert "the forward of 'head' reads 'head.uses', which the step or another network call has set" in text


def test_the_checks_read_nothing_of_the_module() -> None:
    """What a recording reads belongs to the form of a step; with the mode, training after evaluation were another."""
    captured = capture_step(Model("").double(), next(iter(harness.loader(16))), step="validation_step")
    assert all(name != "training" for _, name in captured.network.recording.attributes[-1])
