"""Aggregators of torchmetrics in a training step: as in one process, or a warning says what may differ."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Aggregating(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.hits = MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        self.mean(loss)
        self.hits((logits.argmax(1) == batch[2]).sum())
        self.log_dict({"mean": self.mean, "hits": self.hits}, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


def fitted(rank: int, devices: int, samples: int) -> tuple[dict[str, float], list[str]]:
    torch.set_default_dtype(torch.float64)  # of the metrics, and of Lightning's means
    torch.manual_seed(0)
    strategy = harness.strategy(num_micro_batches=2) if devices > 1 else "auto"
    trainer = harness.trainer(strategy, devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Aggregating(), harness.loader(samples), harness.loader())
    told = [str(each.message) for each in caught if "from each micro-batch" in str(each.message)]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, told


def both_sizes(rank: int, devices: int) -> list[tuple[dict[str, float], list[str]]]:
    """The mini-batches of the second run have 8 and 5 samples."""
    return [fitted(rank, devices, 16), fitted(rank, devices, 13)]


def test_equal_or_told() -> None:
    (even, odd), (expected, other) = harness.run(2, both_sizes, 2)[0], harness.run(1, both_sizes, 1)[0]
    torch.testing.assert_close(even[0], expected[0], rtol=1e-12, atol=1e-12)
    assert odd[0]["hits"] == other[0]["hits"]
    assert odd[0]["mean"] != other[0]["mean"]
    assert not expected[1] + other[1]
    for message in (*even[1], *odd[1]):
        assert "updates the metrics hits with" in message
        assert "self.log(name, value, reduce_fx=...)" in message
    assert len(even[1]) == len(odd[1]) == 1
