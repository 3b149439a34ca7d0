"""A mixture of experts and LayerDrop in a pipeline: called whole, on other ranks than the step, with live values."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.test_uncut import Dropped, Experts
from tests.sampling import sample
from tests.strategy import harness
from tests.strategy.harness import loader

STAGES = [{"modules": ["first", "experts"], "devices": [1]}, {"modules": ["layers", "head", "@step"], "devices": [0]}]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts, self.layers, self.head = nn.Linear(4, 8), Experts(), Dropped(), nn.Linear(8, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.experts(self.first(batch[0]).tanh()))), batch[2])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(rank: int, devices: int) -> list[float]:
    module = Module().double()
    strategy = harness.strategy(stages=STAGES) if devices > 1 else "auto"
    harness.trainer(strategy, devices).fit(module, loader())
    return module.losses


def test_losses_equal_one_process() -> None:
    (alone,) = harness.run(1, fit, 1)
    for losses in harness.run(2, fit, 2):
        assert losses == pytest.approx(alone, rel=1e-9)


class Forces(nn.Module):
    """Returns an energy and its slope, in two layers between which a plan could cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.outer(self.inner(x).tanh())
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Physics(Module):
    """Trains the slope, too, behind a scripted module; the planner chooses the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.layers = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Tanh())), Forces()
        self.head = nn.Linear(9, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        energy, slope = self.layers(self.experts(self.first(x).tanh()))
        logits = self.head(torch.cat([energy, slope], dim=1))
        return F.cross_entropy(logits, batch[2]) + slope.square().mean()


def fit_physics(rank: int, devices: int, options: dict[str, Any]) -> list[float]:
    module = Physics().double()
    strategy = harness.strategy(**{"stages": None, "num_micro_batches": 2, **options}) if devices > 1 else "auto"
    harness.trainer(strategy, devices).fit(module, loader(24))
    return module.losses


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("options", sample([{}, {"step": "whole"}], [{}]), ids=str)
def test_differentiating_and_scripted_modules_train_as_in_one_process(options: dict[str, Any]) -> None:
    alone = fit_physics(0, 1, {})
    for losses in harness.run(2, fit_physics, 2, options):
        assert losses == pytest.approx(alone, rel=1e-12)
