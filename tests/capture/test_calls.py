"""Network calls of steps that run as a whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture.calls import call_batch, joint_loss


class Unit(nn.Module):
    """Results on the unit sphere."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


@pytest.mark.parametrize("last", [nn.LayerNorm(6), Unit()])
def test_comparisons_have_a_gradient_behind_a_normalisation(last: nn.Module) -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 6)
    joint_loss(nn.Sequential(first, last), call_batch({"": ((torch.randn(3, 4),), {})}, 3)).backward()
    assert first.weight.grad is not None
    assert first.weight.grad.norm() > 0.01
