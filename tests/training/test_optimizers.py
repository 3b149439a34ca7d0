"""Optimizers of which every rank has a part: what is told of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.updates.optimizers import OptimizerIndex, warning_of_others


class NormalisedSGD(SGD):
    """Divides gradients by the norm of all that it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in given]).norm()
        for each in given:
            each.add_(each.grad / norm, alpha=-0.05)


def test_others_than_those_of_torch_are_told_to_treat_each_parameter_on_its_own() -> None:
    parameters = [*nn.Linear(4, 2).parameters()]
    assert not warning_of_others([SGD(parameters), Adam(parameters)])
    warning = warning_of_others([Adam(parameters), NormalisedSGD(parameters, lr=0.1)])
    assert "returned NormalisedSGD, of which each rank steps only the parameters of its own stages" in warning
    assert "self.trainer.strategy.grad_norm()" in warning


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
