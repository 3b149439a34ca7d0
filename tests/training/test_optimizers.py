"""Optimizers of which every rank has a part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.updates.optimizers import OptimizerIndex


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
