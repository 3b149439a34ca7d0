"""A loss that a module computes, as in `transformers` called with `labels=`, is the loss of all samples."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GPPStrategy
from lightning_gpp.capture import capture_step
from lightning_gpp.errors import PlanError
from lightning_gpp.planning.assignment.manual import manual
from lightning_gpp.schedules.lowering import derive_messages
from tests.strategy import harness

STEP_APART = [
    {"modules": ["model.trunk"], "devices": [2]},
    {"modules": ["model.head"], "devices": [1, 3]},
    {"modules": ["@step"], "devices": [0]},
]


class Classifier(nn.Module):
    """Returns a loss if it is given labels, else logits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.head = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.trunk(x).tanh())
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class Module(pl.LightningModule):
    def __init__(self, training_loss_inside: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Classifier().double()
        self.training_loss_inside = training_loss_inside
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        if self.training_loss_inside:
            return self.model(x, labels)
        return nn.functional.cross_entropy(self.model(x), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.model(*batch)
        self.log("val_loss", loss)
        self.log("perplexity", loss.exp())  # which is no mean over micro-batches

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (32,), generator=generator))


def fit(strategy: Any, devices: int, **settings: Any) -> dict[str, Any]:
    module = Module(**settings)
    trainer = harness.trainer(strategy, devices=devices, max_epochs=1)
    loader = DataLoader(data(), batch_size=16)
    trainer.fit(module, loader, loader)
    validated = [float(trainer.callback_metrics[name]) for name in ("val_loss", "perplexity")]
    plan = trainer.strategy.plan if isinstance(trainer.strategy, GPPStrategy) else None
    replicas = [len(stage.devices) for stage in plan.stages] if plan is not None else []
    return {"losses": module.losses, "validated": validated, "replicas": replicas}


def piped(rank: int, strategy: dict[str, Any], devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(GPPStrategy(**strategy), devices, **settings)


def captured() -> Any:
    return capture_step(Module(), next(iter(DataLoader(data(), batch_size=16))))


def test_the_planner_keeps_a_loss_on_one_device() -> None:
    settings = {"num_micro_batches": 4, "num_pipelines": 1}
    first, *_ = harness.run(3, piped, settings, 3, {})
    expected = fit("auto", 1)
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert first["validated"] == pytest.approx(expected["validated"], rel=1e-12)


def test_replicas_take_whole_micro_batches_where_only_evaluation_computes_a_loss_inside() -> None:
    settings = {"stages": STEP_APART, "num_micro_batches": 4}
    first, *_ = harness.run(4, piped, settings, 4, {"training_loss_inside": False})
    expected = fit("auto", 1, training_loss_inside=False)
    assert first["replicas"] == [1, 2, 1]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert first["validated"] == pytest.approx(expected["validated"], rel=1e-12)


def test_replicas_that_share_it_are_refused() -> None:
    subject = captured()
    with pytest.raises(PlanError, match=r"has 2 replicas.*cross_entropy in module 'model'.*test_losses.*round_robin"):
        manual(subject.graph, STEP_APART, schedule="1f1b", batch_size=16, num_micro_batches=4)


def test_a_step_of_larger_micro_batches_is_refused() -> None:
    stages = [
        {"modules": ["model"], "devices": [1], "micro_batch_size": 4},
        {"modules": ["@step"], "devices": [0], "micro_batch_size": 16},
    ]
    plan = manual(captured().graph, stages, schedule="1f1b", batch_size=16)
    with pytest.raises(PlanError, match=r"cannot be cut into other micro-batches.*same micro_batch_size"):
        derive_messages(plan, 16, training=True)
