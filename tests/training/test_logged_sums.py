"""Logged sums that add up over micro-batches, and those that do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_gpp.training.logged_sums import LoggedSums, repeated_values


def logged(*values: torch.Tensor | float) -> LoggedSums:
    sums, module = LoggedSums(), nn.Module()
    vars(module).update(log=lambda *_, **__: None)
    for value in values:
        with sums.recorded(module):
            module.log("a", value, reduce_fx="sum")
            module.log("mean", value)
    return sums


@pytest.mark.parametrize(
    ("whole", "parts", "repeats"),
    [
        (torch.tensor(5.0), (torch.tensor(2.0), torch.tensor(3.0)), False),  # a count
        (torch.tensor(2.5), (torch.tensor(2.0), torch.tensor(3.0)), True),  # a mean
        (torch.tensor(0.0), (torch.tensor(0.0), torch.tensor(0.0)), False),  # a count that happens to be zero
        (4.0, (2.0, 2.0), False),  # the number of samples
        (0, (0, 0), True),  # the number of the batch
        (torch.tensor(7.0), (torch.tensor(2.0), torch.tensor(3.0)), False),  # something else
    ],
)
def test_values_that_repeat(whole: torch.Tensor | float, parts: tuple[torch.Tensor, ...], repeats: bool) -> None:
    assert repeated_values(logged(whole), logged(*parts), math.isclose) == ({"a"} if repeats else set())
