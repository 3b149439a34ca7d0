"""Hooks that touch parameters of other ranks: averages of weights, norms, hyperparameters that are modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.strategy import harness
from tests.strategy.harness import loader

TOGETHER = [{"modules": ["student", "teacher"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}]
APART = [{"modules": ["student"], "devices": [1]}, {"modules": ["teacher", "head", "@step"], "devices": [0]}]


class MeanTeacher(pl.LightningModule):
    """The teacher is an average of the student, made in a hook; norms of gradients are kept in another."""

    def __init__(self, average_in: str = "hook", norm: str = "") -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(5, 1)
        self.average_in, self.norm = average_in, norm
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        target = self.teacher(batch[0])
        features = self.student(batch[0])
        if self.average_in == "step":
            self.average()
        return (self.head(features) - batch[2].unsqueeze(1)).square().mean() + (features - target).square().mean()

    @torch.no_grad()
    def average(self) -> None:
        for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.average_in == "hook":
            self.average()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.norm == "strategy":
            total = getattr(self.trainer.strategy, "grad_norm", lambda: grad_norm(self, 2)["grad_2.0_norm_total"])()
            self.norms.append(float(total))
        elif self.norm == "lightning":
            self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        elif self.norm == "squares":
            float(torch.stack([p.grad.square().sum() for p in self.parameters() if p.grad is not None]).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, stages: Any, average_in: str = "hook", norm: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    module = MeanTeacher(average_in, norm).double()
    strategy = harness.strategy(stages=stages, num_micro_batches=2) if stages else "auto"
    devices = 2 if stages else 1
    trainer = harness.trainer(strategy, devices, callbacks=[ModelSummary(-1)] if rank else None, max_epochs=1)
    trainer.fit(module, loader())
    state = module.state_dict() if rank == 0 else {}
    return {"state": {name: value.tolist() for name, value in state.items()}, "norms": module.norms}


@pytest.mark.parametrize(("average_in", "norm"), [("hook", "strategy"), ("hook", "lightning"), ("step", "")])
def test_an_average_equals_one_process(average_in: str, norm: str) -> None:
    """In the step it needs the step as a whole, which is chosen by itself."""
    alone = harness.run(1, fit, None, average_in, norm)[0]
    first, second = harness.run(2, fit, TOGETHER, average_in, norm)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"])
    for name, values in alone["state"].items():
        torch.testing.assert_close(torch.tensor(first["state"][name]), torch.tensor(values))


@pytest.mark.parametrize(
    ("stages", "average_in", "norm", "message"),
    [
        (APART, "hook", "", r"`add_` needs values of '(student|teacher).0.weight' \(stage '"),
        (APART, "step", "", r"the step changes 'teacher.0.weight', which a module reads"),
        (TOGETHER, "hook", "squares", r"needs values of .*self.trainer.strategy.grad_norm\(\)"),
    ],
    ids=["apart", "in the step", "norm of all"],
)
def test_what_would_be_wrong_is_refused(stages: Any, average_in: str, norm: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        harness.run(2, fit, stages, average_in, norm)


class KeepsNet(pl.LightningModule):
    """Keeps a module among its hyperparameters, as many templates do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def save_with_net(rank: int, folder: str) -> list[Any] | None:
    torch.manual_seed(0)
    module = KeepsNet(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double())
    stages = [{"modules": ["net.0"], "devices": [1]}, {"modules": ["net.1", "@step"], "devices": [0]}]

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(f"{folder}/whole.ckpt")

    harness.trainer(harness.strategy(stages=stages), 2, callbacks=[Save()], max_epochs=1).fit(module, loader())
    if rank != 0:
        return None
    saved = KeepsNet.load_from_checkpoint(f"{folder}/whole.ckpt", weights_only=False)
    return [torch.equal(a, b) for a, b in zip(saved.parameters(), module.parameters(), strict=True)]


def test_modules_among_the_hyperparameters_are_saved_with_their_values(tmp_path: Path) -> None:
    assert harness.run(2, save_with_net, str(tmp_path))[0] == [True] * 4
