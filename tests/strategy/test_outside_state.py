"""What the step changes outside of the module is that of one process on every rank: variables, classes, callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategy import harness
from tests.strategy.harness import TwoTowers

pytestmark = pytest.mark.timeout(150)  # processes start, and train

SEEN: dict[str, list[int]] = {}
NUMBERS: list[int] = []


class Counter(pl.Callback):
    """Has a number that the step changes."""

    def __init__(self) -> None:
        self.samples = 0


class Data(pl.LightningDataModule):
    """Has the samples' sizes in the order in which the step sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        return harness.loader()


class Changing(TwoTowers):
    """Changes what is around it, and reads it in hooks."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.found = list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        size = len(batch[0])
        SEEN.setdefault("sizes", []).append(size)
        NUMBERS.extend(range(size))
        type(self).calls += size
        self.trainer.samples = getattr(self.trainer, "samples", 0) + size
        self.trainer.callbacks[0].samples += size
        self.trainer.datamodule.sizes[batch_idx] = self.trainer.datamodule.sizes.get(batch_idx, 0) + size
        output: dict[str, Tensor] = super().training_step(batch, batch_idx)
        return output

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.found.append((sum(SEEN["sizes"]), len(NUMBERS), type(self).calls, self.trainer.samples))
        self.found.append((self.trainer.callbacks[0].samples, dict(self.trainer.datamodule.sizes)))


def changed(rank: int, devices: int = 2) -> list[Any]:
    SEEN.clear()
    NUMBERS.clear()
    Changing.calls = 0
    strategy = harness.strategy(num_micro_batches=2) if devices == 2 else "auto"
    module = Changing().double()
    harness.trainer(strategy, devices, callbacks=[Counter()]).fit(module, datamodule=Data())
    return module.found


def test_hooks_on_all_ranks_read_what_one_process_has() -> None:
    (alone,) = harness.run(1, changed, 1)
    assert alone[-1][0] == 44
    assert harness.run(2, changed, timeout=100.0) == [alone, alone]


def varied(rank: int, devices: int) -> list[int]:
    sizes = list[int]()

    class Noting(TwoTowers):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            sizes.append(len(batch[0]))
            output: dict[str, Tensor] = super().training_step(batch, batch_idx)
            return output

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            sizes.append(100 * len(batch[0]))
            super().validation_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            totals.append(sum(sizes))
            sizes.clear()

    totals = list[int]()
    strategy = harness.strategy(num_micro_batches=2) if devices == 2 else "auto"
    harness.trainer(strategy, devices).fit(Noting().double(), harness.loader(), harness.loader())
    return totals


def test_variables_around_the_class_are_shared_and_containers_stay_the_same() -> None:
    (alone,) = harness.run(1, varied, 1)
    assert harness.run(2, varied, 2, timeout=100.0) == [alone, alone]
