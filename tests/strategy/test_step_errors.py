"""Errors of the user's step: they are told as what they are, not as faults of capture or of micro-batches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.errors import GPPError
from tests.strategy import harness


class WrongName(harness.TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(misspelt, batch_idx)  # type: ignore[name-defined]  # noqa: F821


class WrongShape(harness.TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.left(torch.zeros(2, 99, dtype=torch.float64)).sum()


class Detached(harness.TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)["loss"].detach()


class MadeInHook(WrongName):
    """A hook that runs after set-up might make what the step lacks."""

    def on_train_start(self) -> None:
        global misspelt
        misspelt = None


class FailsOnFewSamples(harness.TwoTowers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) < 8:
            raise ValueError("too few samples")
        return super().training_step(batch, batch_idx)


def refused(rank: int, kind: type[harness.TwoTowers]) -> tuple[str, str]:
    try:
        harness.trainer(harness.strategy(), devices=2).fit(kind().double(), harness.loader(16))
    except GPPError as error:
        return type(error).__name__, f"{error}{getattr(error, '__notes__', '')}"
    return "", ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            WrongName,
            r"NameError: name 'misspelt' is not defined .*'All ranks have raised exceptions. Rank . raised this one",
        ),
        (WrongShape, r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x99 and .*_errors.py:\d+\)"),
    ],
)
def test_a_step_that_fails_on_one_device_too(kind: type[harness.TwoTowers], message: str) -> None:
    for name, told in harness.run(2, refused, kind):
        assert name == "StepError"
        assert re.match(f"training_step fails on one device, too, for the undivided mini-batch: {message}", told)


def test_a_loss_without_a_gradient() -> None:
    with pytest.raises(AssertionError, match="training_step returned a loss without a gradient: it was detached"):
        harness.run(2, trained, Detached)


def trained(rank: int, kind: type[harness.TwoTowers]) -> None:
    harness.trainer(harness.strategy(), devices=2).fit(kind().double(), harness.loader(16))


@pytest.mark.parametrize("kind", [MadeInHook, FailsOnFewSamples])
def test_a_step_that_may_work_on_one_device(kind: type[harness.TwoTowers]) -> None:
    assert all(name != "StepError" for name, _ in harness.run(2, refused, kind))
