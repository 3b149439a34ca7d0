"""Modules know the device of their stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpp._compat.lightning_module import set_device
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader


class OnItsDevice(TwoTowers):
    """Makes a tensor on its device in each step."""

    configured_on = ""

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().loss(batch)
        return loss + torch.zeros((), device=self.device), logits

    def configure_optimizers(self) -> Any:
        self.configured_on = str(self.device)
        return super().configure_optimizers()


def on_device(rank: int, accelerator: str) -> tuple[str, str, int]:
    module = OnItsDevice().double()
    set_device(module, torch.device("meta"))
    stages = [{"modules": ["left"], "devices": [0]}, {"modules": ["right", "head", "@step"], "devices": [0]}]
    trainer = harness.trainer(harness.strategy(stages=stages), accelerator=accelerator, max_steps=2)
    trainer.fit(module, loader())
    return module.configured_on, str(module.device), len(module.losses)


ON_GPUS = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("accelerator", "device"), [("cpu", "cpu"), pytest.param("gpu", "cuda:0", marks=ON_GPUS)])
def test_modules_know_their_device(accelerator: str, device: str) -> None:
    """A trainer moves the whole module to its device, which tells it. Here parts are moved, and it is told first."""
    assert harness.run(1, on_device, accelerator) == [(device, "cpu", 2)]
