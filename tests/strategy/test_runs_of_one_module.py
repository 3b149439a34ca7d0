"""Several runs of one module, by several trainers: what the earlier ones leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.errors import CheckpointError
from tests.strategy import harness


class Weighted(pl.LightningModule):
    """A stage has all parameters, another one has nothing but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.criterion(self.net(batch[0]), batch[2])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[2]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(devices: int, stages: Any) -> pl.Trainer:
    strategy = harness.strategy(stages=stages, num_micro_batches=1) if devices > 1 else "auto"
    return harness.trainer(strategy, devices, max_epochs=1)


def fitted_twice(rank: int, devices: int = 2) -> float:
    module = Weighted().double()
    for _ in range(2):
        made = trainer(devices, {"net": 1, "criterion": 0})
        made.fit(module, harness.loader(16), harness.loader(16))
    return float(made.callback_metrics["loss"])


def test_a_stage_may_have_nothing_but_buffers() -> None:
    assert harness.run(2, fitted_twice) == pytest.approx([fitted_twice(0, 1)] * 2, rel=1e-12)


def placed(first: int, second: int) -> list[Any]:
    """Stages with the first and the second layer on these devices."""
    layers = [{"modules": ["net.0"], "devices": [first]}, {"modules": ["net.2"], "devices": [second]}]
    return [*layers, {"modules": ["criterion", "@step"], "devices": [0]}]


def saved_by_the_first(rank: int, folder: Path) -> str:
    module = Weighted().double()
    first = trainer(2, placed(1, 0))
    first.fit(module, harness.loader(16), harness.loader(16))
    first.save_checkpoint(folder / "first.ckpt")
    trainer(2, placed(0, 1)).fit(module, harness.loader(16), harness.loader(16))
    with pytest.raises(CheckpointError) as raised:
        first.save_checkpoint(folder / "again.ckpt")
    return str(raised.value)


def test_an_earlier_trainer_says_that_it_cannot_save_any_more(tmp_path: Path) -> None:
    for text in harness.run(2, saved_by_the_first, tmp_path):
        assert text.startswith("This trainer's run is over, and a later one has placed net.0.weight, net.0.bias")
    assert [path.name for path in tmp_path.iterdir()] == ["first.ckpt"]


def validated(rank: int, devices: int = 2) -> float:
    module = Weighted().double()
    if rank:
        nn.init.zeros_(module.net[2].weight)
    (found,) = trainer(devices, {"net.0": 0, "net.2": 1}).validate(module, harness.loader(16), verbose=False)
    return float(found["validation"])


def test_an_evaluation_takes_the_weights_of_rank_0() -> None:
    assert harness.run(2, validated) == pytest.approx([validated(0, 1)] * 2, rel=1e-12)
