"""Errors of the user's step: every rank tells the line and the error."""

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


def refused(rank: int, kind: type[harness.TwoTowers]) -> tuple[str, str]:
    try:
        harness.trainer(harness.strategy(), devices=2).fit(kind().double(), harness.loader(16))
    except GPPError as error:
        return type(error).__name__, f"{error}{getattr(error, '__notes__', '')}"
    return "", ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongName, r"_errors.py:\d+.*NameError: name 'misspelt' is not defined"),
        (WrongShape, r"_errors.py:\d+.*RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_an_error_of_the_step_names_its_line_on_all_ranks(kind: type[harness.TwoTowers], message: str) -> None:
    for _, told in harness.run(2, refused, kind):
        assert re.search(message, told, re.DOTALL), told


def test_a_loss_without_a_gradient() -> None:
    with pytest.raises(AssertionError, match="training_step returned a loss without a gradient: it was detached"):
        harness.run(2, trained, Detached)


def trained(rank: int, kind: type[harness.TwoTowers]) -> None:
    harness.trainer(harness.strategy(), devices=2).fit(kind().double(), harness.loader(16))
