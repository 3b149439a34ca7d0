"""Training steps that take `dataloader_iter` read their mini-batches on all ranks, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategy import harness
from tests.strategy.harness import TwoTowers, make_data


class Fetched(TwoTowers):
    """Reads as many mini-batches in a step as it is told; logs the number of the last."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.indices = number, list[int]()

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        total = torch.zeros(())
        for _ in range(self.number):
            batch, batch_idx, _ = next(dataloader_iter)
            total = total + self.loss([tensor.to(self.device) for tensor in batch])[0]
        self.indices.append(batch_idx)
        self.log("loss", total, on_epoch=True, batch_size=len(batch[0]))
        return total

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


Found = tuple[list[float], list[int], list[float]]


def trained(rank: int, number: int, devices: int, shuffle: bool) -> Found:
    torch.manual_seed(0)
    module = Fetched(number).double()
    strategy: Any = harness.strategy(num_micro_batches=2) if devices > 1 else "auto"
    data = DataLoader(make_data(30), batch_size=8, shuffle=shuffle, generator=torch.Generator().manual_seed(1))
    trainer = harness.trainer(strategy, devices)
    trainer.fit(module, data)
    weights = [float(value.detach().sum()) for value in module.parameters() if not value.is_meta]
    return module.losses, module.indices, weights if devices == 1 or rank == 0 else []


@pytest.mark.parametrize(("number", "shuffle"), [(1, False), (2, True)])
def test_two_processes_read_what_one_reads(number: int, shuffle: bool) -> None:
    """Four mini-batches in an epoch, of which the last is smaller."""
    (alone,) = harness.run(1, trained, number, 1, shuffle)
    first, second = harness.run(2, trained, number, 2, shuffle)
    assert len(alone[0]) == 2 * 4 // number
    for losses, indices, _ in (first, second):
        assert losses == pytest.approx(alone[0], rel=1e-12)
        assert indices == alone[1]
    assert first[2] == pytest.approx(alone[2], rel=1e-10)
