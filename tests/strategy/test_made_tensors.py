"""Buffers and attributes that forwards make or replace: runs, checkpoints and later runs are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategy import harness


class Table(nn.Module):
    """Adds positions from a table, which a sequence longer than all before makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table") or self.table is None or len(self.table) < x.shape[1]:
            self.fill(torch.arange(4.0 * x.shape[1], dtype=x.dtype).view(-1, 4) / 10)
        return self.layer(x + self.table[: x.shape[1]])

    def fill(self, table: Tensor) -> None:
        self.table = table


class Saved(Table):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)


class Registered(Table):
    """Registers the buffer in the forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.table

    def fill(self, table: Tensor) -> None:
        self.register_buffer("table", table, persistent=False)


class Empty(Table):
    """Has a buffer without rows at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0, 4))


class Plain(Table):
    """Has the table in an attribute, which is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        del self.table
        self.table = None


class Absent(Table):
    """Has no such attribute before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.table


class Longest(Table):
    """Knows by a number for what the table is long enough."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.fill(torch.arange(4.0 * x.shape[1], dtype=x.dtype).view(-1, 4) / 10)
        return self.layer(x + self.table[: x.shape[1]])


class LongestPlain(Longest):
    """Has the table in an attribute, from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        del self.table


class Tabled(pl.LightningModule):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(4, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.loss(batch)))

    test_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class InStep(Tabled):
    """The step makes the buffer, and passes it to a module."""

    def loss(self, batch: Any) -> Tensor:
        if not hasattr(self, "shift") or len(self.shift) < batch[0].shape[1]:
            self.register_buffer("shift", torch.arange(batch[0].shape[1], dtype=torch.float64)[:, None] / 10)
        return super().loss([batch[0] + self.shift[: batch[0].shape[1]]])


class InCutForward(Tabled):
    """The forward that the stages cut makes the buffer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__(first)
        self.register_buffer("shift", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None or len(self.shift) < x.shape[1]:
            self.shift = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        return self.last(self.first(x).tanh() * self.shift[: x.shape[1]])


class InRoot(Tabled):
    """The forward that the stages cut puts the table into an attribute."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__(first)
        self.shift = None

    forward = InCutForward.forward


MODULES: dict[str, tuple[type[Tabled], type[nn.Module]]] = {
    "none": (Tabled, Table),
    "saved": (Tabled, Saved),
    "registered": (Tabled, Registered),
    "empty": (Tabled, Empty),
    "attribute": (Tabled, Plain),
    "absent": (Tabled, Absent),
    "longest": (Tabled, Longest),
    "longest_attribute": (Tabled, LongestPlain),
    "root": (InRoot, Plain),
    "step": (InStep, Table),
    "cut": (InCutForward, Saved),
}


def data(length: int, samples: int = 18) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(samples, length, 4, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(values), batch_size=8)


def trained(name: str, devices: int, folder: Path) -> tuple[list[float], dict[str, Any], list[float]]:
    """Losses of training and validation, the tensors in the checkpoint, and losses of a test afterwards."""
    outer, inner = MODULES[name]
    torch.manual_seed(0)
    module = outer(inner()).double()
    stages = [{"modules": ["first"], "devices": [1]}, {"modules": ["last", "@step"], "devices": [0]}]
    strategy = harness.strategy(num_micro_batches=2, stages=stages) if devices > 1 else "auto"
    trainer = harness.trainer(strategy, devices, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader([*data(5), *data(4)], batch_size=None), data(7))
    losses, module.losses = module.losses, []
    file = folder / f"{name}{devices}.ckpt"
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=True)["state_dict"] if trainer.is_global_zero else {}
    trainer.test(module, data(9), verbose=False)
    return losses, {name: value.tolist() for name, value in saved.items()}, module.losses


def all_trained(rank: int, devices: int, folder: Path) -> dict[str, Any]:
    return {name: trained(name, devices, folder) for name in MODULES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("made")
    return [harness.run(devices, all_trained, devices, folder)[0] for devices in (1, 2)]


@pytest.mark.parametrize("name", MODULES)
def test_a_run_is_that_of_one_process(runs: list[Any], name: str) -> None:
    (losses, saved, later), (in_stages, in_parts, later_in_stages) = (run[name] for run in runs)
    assert in_stages == pytest.approx(losses, rel=1e-12)
    assert later_in_stages == pytest.approx(later, rel=1e-12)
    assert in_parts.keys() == saved.keys()
    for key, values in saved.items():
        torch.testing.assert_close(torch.tensor(in_parts[key]), torch.tensor(values))
