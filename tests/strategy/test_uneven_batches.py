"""A last mini-batch of any size trains; a wrong count of samples is told with the tensors and the setting."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import ConfigError
from tests.strategy import harness


class Normed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.sizes: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module: Normed, loader: DataLoader[Any], **options: Any) -> list[int]:
    harness.trainer(harness.strategy(stages=None, **options), max_epochs=1).fit(module, loader)
    return module.sizes


def uneven(rank: int) -> list[int]:
    data = TensorDataset(torch.randn(13, 4), torch.arange(13) % 2)
    return fit(Normed(), DataLoader(data, 8), num_micro_batches=2)


def test_a_last_micro_batch_of_one_sample_is_none() -> None:
    assert harness.run(1, uneven) == [[8, 5]]


class TimeMajor(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.GRU(4, 3), nn.Linear(3, 2)])  # type: ignore[assignment]

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net[1](self.net[0](batch[0])[0][-1]), batch[1])


def time_major(rank: int) -> str:
    """The error without the setting; with it, the same mini-batches train."""
    loader = DataLoader([(torch.randn(5, 16, 4), torch.arange(16) % 2)], batch_size=None)
    with pytest.raises(ConfigError) as told:
        fit(TimeMajor(), loader)
    fit(TimeMajor(), loader, batch_dims={"0": 1, "1": 0})
    return str(told.value)


def test_time_major_batches_are_told_with_the_setting() -> None:
    told = r"5 samples do not give 4.* item 0 \(5, 16, 4\)\. .* item 1 \(16,\)\. .*batch_dims=\{'0': 1, '1': 0\}"
    assert re.search(told, harness.run(1, time_major)[0])
