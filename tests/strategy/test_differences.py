"""Differences from one process (docs/explanation/contract.md) are told, with a line that gives equal numbers."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.strategy import harness
from tests.strategy.harness import TwoTowers


class Keeps(TwoTowers):
    """Lists that grow in steps, of numbers and of tensors, which a hook around mini-batches reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.tensors = list[float](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        self.kept.append(loss.item())
        self.tensors.append(loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        len(self.tensors)


class LogsSometimes(TwoTowers):
    """A mean of some micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self.loss(batch)
        if batch[0][0, 0] > 0:
            self.log("some", batch[0].mean())
        return {"loss": loss, "logits": logits.detach()}


class Contrasts(TwoTowers):
    """A loss of all samples, of a network that computes each by itself."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0], batch[1])
        return (logits - logits.mean(0)).square().mean(), logits


class Masked(TwoTowers):
    """A mean over labelled samples."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0], batch[1])
        return F.cross_entropy(logits, batch[2].where(batch[0][:, 0] > -1, -100)), logits


class Sums(TwoTowers):
    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0], batch[1])
        loss = F.cross_entropy(logits, batch[2], reduction="sum")
        if self.training:
            self.log_dict({"sum": loss.detach(), "of means": logits.mean(), "rows": float(len(batch[0]))})
        return loss, logits


KINDS = (Keeps, LogsSometimes, Contrasts, Masked, Sums)
Report = tuple[list[str], dict[str, float], list[float]]
"""Warnings, metrics and losses."""


def fitted(kind: type[TwoTowers], devices: int, **options: Any) -> Report:
    torch.manual_seed(0)
    module = kind().double()
    given = {"stages": harness.STAGES, "num_micro_batches": 2, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = harness.trainer(harness.strategy(**given) if devices > 1 else "auto", devices, max_epochs=1)
        trainer.fit(module, harness.loader(13))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [str(each.message) for each in caught if "`" not in str(each.message)], metrics, module.losses


REMEDIES: list[tuple[type[TwoTowers], dict[str, Any]]] = [
    (Contrasts, {"step": "whole"}),
    (Sums, {"loss_reduction": "sum"}),
]


def all_fitted(rank: int) -> tuple[dict[str, Report], list[Report]]:
    told = {kind.__name__: fitted(kind, 2) for kind in KINDS}
    return told, [fitted(kind, 2, **options) for kind, options in REMEDIES]


@pytest.fixture(scope="module")
def reports() -> tuple[dict[str, Report], list[Report]]:
    """Of rank 0."""
    found: tuple[dict[str, Report], list[Report]] = harness.run(2, all_fitted)[0]
    return found


TOLD = {
    "Keeps": [
        "changes tensors. Only the ranks that run the step",
        "changes kept, tensors. It runs once per micro-batch",
    ],
    "LogsSometimes": ["logged 'some' for some micro-batches of a mini-batch only"],
    "Contrasts": [r"strategy\.step=whole"],
    "Masked": ["do not count the same"],
    "Sums": [r"set strategy\.loss_reduction"],
}


@pytest.mark.parametrize("name", TOLD)
def test_told(reports: tuple[dict[str, Report], list[Report]], name: str) -> None:
    told = reports[0][name][0]
    for pattern in TOLD[name]:
        assert sum(bool(re.search(pattern, text, re.DOTALL)) for text in told) == 1, told


def test_remedies_give_the_numbers_of_one_process(reports: tuple[dict[str, Report], list[Report]]) -> None:
    for (kind, _), (told, metrics, losses) in zip(REMEDIES, reports[1], strict=True):
        _, expected, known = fitted(kind, 1)
        assert not [text for text in told if "undivided" in text], kind
        assert losses == pytest.approx(known, rel=1e-12), kind
        assert metrics == pytest.approx(expected, rel=1e-10), kind
