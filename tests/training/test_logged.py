"""Logged values that are reduced over micro-batches as over batches, and those that are not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_gpp.training.checks.results import Logged, other_reductions


def logged(reduction: str, *values: torch.Tensor | float) -> Logged:
    sums, module = Logged(), nn.Module()
    vars(module).update(log=lambda *_, **__: None)
    for value in values:
        with sums.recorded(module):
            module.log("a", value, reduce_fx=reduction)
    return sums


@pytest.mark.parametrize(
    ("reduction", "whole", "parts", "otherwise"),
    [
        ("sum", torch.tensor(5.0), (torch.tensor(2.0), torch.tensor(3.0)), False),  # a count
        ("sum", torch.tensor(2.5), (torch.tensor(2.0), torch.tensor(3.0)), True),  # a mean
        ("sum", torch.tensor(0.0), (torch.tensor(0.0), torch.tensor(0.0)), False),  # a count that happens to be zero
        ("sum", 4.0, (2.0, 2.0), False),  # the number of samples
        ("sum", 0, (0, 0), True),  # the number of the batch
        ("max", torch.tensor(3.0), (torch.tensor(2.0), torch.tensor(3.0)), False),  # a largest value
        ("max", torch.tensor(2.5), (torch.tensor(2.0), torch.tensor(3.0)), True),  # a mean
        ("min", torch.tensor(2.0), (torch.tensor(2.0), torch.tensor(3.0)), False),
        ("mean", torch.tensor(2.5), (torch.tensor(2.0), torch.tensor(3.0)), False),
        ("mean", 5.0, (2.0, 3.0), True),  # a number of rows
    ],
)
def test_values_that_are_combined_otherwise(
    reduction: str, whole: torch.Tensor | float, parts: tuple[torch.Tensor, ...], otherwise: bool
) -> None:
    found = other_reductions(logged(reduction, whole), logged(reduction, *parts), math.isclose)
    assert found == ({"a": "sum" if reduction == "mean" else "mean"} if otherwise else {})
