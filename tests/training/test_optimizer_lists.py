"""Optimizers with tensors beside their parameters are found."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.optimizer_lists import check_lists
from lightning_gpp.training.optimizers import OptimizerIndex


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights in lists, in the order of the parameters of an optimizer inside."""

    def __init__(self, base: torch.optim.Optimizer, kind: str) -> None:
        super().__init__(base.param_groups, {})
        parameters = [each for group in base.param_groups for each in group["params"]]
        slow = [each.detach().clone() for each in parameters]
        kept: dict[str, Any] = {"list": slow, "nested": {"slow": [slow]}, "numbers": torch.ones(3), "same": parameters}
        self.kept, self.base = kept[kind], base


@pytest.mark.parametrize("kind", ["list", "nested"])
def test_refused(kind: str) -> None:
    optimizer = Lookahead(torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1), kind)
    message = "Lookahead, which keeps a tensor of shape (2, 4) in its attribute 'kept', in the order of its parameters"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_lists(optimizer)
    outer = Lookahead(optimizer, "numbers")
    with pytest.raises(ConfigError, match="in its attribute 'base'"):
        check_lists(outer)


@pytest.mark.parametrize("kind", ["numbers", "same"])
def test_taken(kind: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1), kind)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.base.step()
    check_lists(optimizer)


def test_a_guarded_state_dict_is_an_error_that_names_the_ways_out() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    index = OptimizerIndex(optimizer, model)
    guard = index.guard()
    with pytest.raises(ConfigError, match=r"Adam\.state_dict\(\) was called during training.*optimizer_state"):
        optimizer.state_dict()
    assert index.merged({})["param_groups"][0]["lr"] == 0.1
    guard.remove()
    assert optimizer.state_dict()["param_groups"]
