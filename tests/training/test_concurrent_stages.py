"""Plans for devices that compute several stages at the same time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import plan_for


class Branches(nn.Module):
    """Eight towers of small layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        tower = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))  # noqa: E731
        self.towers, self.head = nn.ModuleList(tower() for _ in range(8)), nn.Linear(8 * 64, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(torch.cat([tower(batch[:, k]) for k, tower in enumerate(self.towers)], -1)).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_concurrent_stages_have_shares_of_a_device(devices: int) -> None:
    captured = capture_step(Branches(), torch.randn(16, 8, 64))
    options = Options(concurrent_stages=8 // devices, cluster="dgx_a100", num_micro_batches=1, search_seconds=0.5)
    plan = plan_for(captured, options, devices)
    assert {stage.devices for stage in plan.stages} == {(device,) for device in range(devices)}
    branches = [stage for number, stage in enumerate(plan.stages) if number != plan.step_stage]
    assert len(branches) >= 7
    assert all(len(stage.modules) == 1 and stage.modules[0].startswith("towers") for stage in branches)
