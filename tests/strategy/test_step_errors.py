"""Errors of the user's step: they are told with their line."""

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


def refused(rank: int) -> list[tuple[str, str]]:
    found = []
    for kind in (WrongName, WrongShape):
        with pytest.raises(GPPError) as caught:
            trained(rank, kind)
        found.append((type(caught.value).__name__, f"{caught.value}{getattr(caught.value, '__notes__', '')}"))
    return found


def test_errors_of_a_step_are_told_with_their_line() -> None:
    patterns = r"NameError: name 'misspelt' is not defined", r"shapes cannot be multiplied \(2x99 and "
    for found in harness.run(2, refused):
        for (name, told), pattern in zip(found, patterns, strict=True):
            assert name == "CaptureError"
            assert re.search(pattern, told)
            assert re.search(r"test_step_errors\.py:\d+", told)


def test_a_loss_without_a_gradient() -> None:
    with pytest.raises(AssertionError, match="training_step returned a loss without a gradient: it was detached"):
        harness.run(2, trained, Detached)


def trained(rank: int, kind: type[harness.TwoTowers]) -> None:
    harness.trainer(harness.strategy(), devices=2).fit(kind().double(), harness.loader(16))
