"""gpp-plan plans steps that run as a whole: manual optimization, and what cannot run on micro-batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import open_dict
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from lightning_gpp.cli.subject import Step
from lightning_gpp.cli.task import Task, predict, task_of
from lightning_gpp.errors import CaptureError
from lightning_gpp.planning import Prediction
from tests.cli.commands import composed


class Samples(L.LightningDataModule):
    """Vectors, or one point cloud per sample."""

    def __init__(self, clouds: bool = False) -> None:
        super().__init__()
        self.clouds = clouds

    def train_dataloader(self) -> Any:
        batch = {"clouds": [torch.randn(3 + n, 6) for n in range(8)]} if self.clouds else {"x": torch.randn(8, 6)}
        return DataLoader([batch], batch_size=None)


class Opponents(L.LightningModule):
    """Two optimizers and a scheduler, used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.maker(torch.randn(len(batch["x"]), 4))
        self._update(first, softplus(-self.judge(made)).mean())
        self._update(second, softplus(-self.judge(batch["x"])).mean() + softplus(self.judge(made.detach())).mean())
        self.lr_schedulers().step()

    def _update(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        first, second = torch.optim.Adam(self.maker.parameters()), torch.optim.Adam(self.judge.parameters())
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 10)]


class Clouds(L.LightningModule):
    """Calls a module once per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(torch.stack([self.points(cloud).amax(0) for cloud in batch["clouds"]])).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def planned(kind: type[L.LightningModule], *overrides: str) -> tuple[Task, Prediction]:
    config = composed("experiment=two_tower", "trainer.devices=2", *overrides, name="plan")
    with open_dict(config):
        config.model = {"_target_": f"{__name__}.{kind.__name__}"}
        config.data = {"_target_": f"{__name__}.Samples", "clouds": kind is Clouds}
    task = task_of(config)
    return task, predict(task)


@pytest.mark.parametrize(("kind", "modules"), [(Opponents, {"maker", "judge"}), (Clouds, {"points", "head"})])
def test_the_plan_is_for_a_step_as_a_whole(kind: type[L.LightningModule], modules: set[str]) -> None:
    task, prediction = planned(kind)
    assert isinstance(task.subject, Step)
    assert "runs as a whole" in task.subject.notes[0]
    assert (prediction.plan.notes["step"], prediction.plan.schedule) == ("whole", "gpipe")  # as it runs
    assert {name for stage in prediction.plan.stages for name in stage.modules} == {*modules, "@step"}


def test_micro_batches_that_the_user_wants_are_kept() -> None:
    with pytest.raises(CaptureError, match="depends on the number of samples"):
        planned(Clouds, "strategy.step=micro_batches")
