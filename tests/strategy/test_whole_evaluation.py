"""Validation, testing and prediction on samples that depend on each other give the numbers of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.errors import CaptureError
from tests.strategy import harness
from tests.strategy.test_auto_step import STAGES, Clouds, Neighbours, batches


class Convolution(nn.Module):
    """A layer of a graph network."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = self.linear(x)[edges[0]]
        return torch.zeros(len(x), 8, dtype=x.dtype).index_add(0, edges[1], sent).tanh()


class Layered(Neighbours):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(5), Convolution(8)  # type: ignore[assignment]

    def loss(self, batch: Any) -> Tensor:
        x, edges = batch["x"], batch["edges"]
        return F.cross_entropy(self.head(self.second(self.first(x, edges), edges)), batch["y"])


Loss = Callable[[Neighbours, Any], Tensor]
LOSSES: dict[str, Loss] = {"edges": Neighbours.loss, "layers": Layered.loss, "clouds": Clouds.loss}


class Evaluated(Layered):
    """Evaluates a loss of samples that depend on each other; trains with it by hand, or with one of single samples."""

    def __init__(self, kind: str, by_hand: bool) -> None:
        super().__init__()
        if kind != "layers":
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)
        self.evaluated, self.automatic_optimization = LOSSES[kind], not by_hand
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return F.cross_entropy(self.head(self.second(self.first(batch["x"]).tanh())), batch["y"])
        loss, optimizer = self.evaluated(self, batch), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.evaluated(self, batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.evaluated(self, batch)
        self.log("loss", loss)
        self.seen.append(float(loss))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.evaluated(self, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep nothing."""


def run(strategy: Any, devices: int, kind: str, loop: str, by_hand: bool = False) -> dict[str, Any]:
    module, data = Evaluated(kind, by_hand).double(), DataLoader(batches(), batch_size=None)
    trainer = harness.trainer(strategy, devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = trainer.fit(module, data, data) if loop == "fit" else getattr(trainer, loop)(module, data)
        if loop == "fit":  # an evaluation keeps the plan of the training
            results = [float(each) for each in trainer.predict(module, data) if each is not None]
    return {
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "results": [float(each) for each in results if each is not None] if loop == "predict" else results,
        "seen": module.seen,
        "whole": [str(warning.message) for warning in caught if "runs as a whole" in str(warning.message)],
    }


def divided(rank: int, settings: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    return run(harness.strategy(stages=STAGES, num_micro_batches=2, **settings), 2, *arguments)


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("layers", "predict"),
        ("clouds", "test"),
        ("clouds", "predict"),
        pytest.param("edges", "validate", marks=pytest.mark.acceptance),
        pytest.param("clouds", "validate", marks=pytest.mark.acceptance),
    ],
)
def test_without_training(kind: str, loop: str) -> None:
    found, other = harness.run(2, divided, {}, kind, loop)
    expected = run("auto", 1, kind, loop)
    for each in (found, other):
        assert each["logged"] == pytest.approx(expected["logged"], rel=1e-12)
    assert found["seen"] == pytest.approx(expected["seen"], rel=1e-12)
    if loop == "predict":
        assert found["results"] == pytest.approx(expected["results"], rel=1e-12)
        assert other["results"] == []
    assert bool(found["whole"]) == (kind == "clouds"), "what can be captured need not run as a whole, only undivided"
    assert all(message.startswith(f"The {loop.replace('validate', 'validation')} step") for message in found["whole"])


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        pytest.param("layers", True, marks=pytest.mark.acceptance),
        pytest.param("clouds", True, marks=pytest.mark.acceptance),
        pytest.param("edges", False, marks=pytest.mark.acceptance),
        ("clouds", False),
    ],
)
def test_in_training(kind: str, by_hand: bool) -> None:
    found, other = harness.run(2, divided, {}, kind, "fit", by_hand)
    expected = run("auto", 1, kind, "fit", by_hand)
    for each in (found, other):
        assert each["logged"] == pytest.approx(expected["logged"], rel=1e-12)
    assert found["results"] == pytest.approx(expected["results"], rel=1e-12)


def refused(rank: int) -> str:
    with pytest.raises(CaptureError) as caught:
        divided(rank, {"step": "micro_batches"}, "clouds", "validate")
    return str(caught.value)


def test_micro_batches_that_the_user_wants_are_kept() -> None:
    assert all("depends on the number of samples" in message for message in harness.run(2, refused))
