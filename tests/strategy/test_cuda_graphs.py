"""Training with recorded and concurrent stages is the same training; a tape records in place of a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.errors import ConfigError
from lightning_gpp.training import setup
from tests.runtime.tape import Tape
from tests.runtime.test_concurrent import Histories
from tests.strategy import harness

SAMPLES = 36
"""Nine mini-batches of four samples in each epoch; with two pipelines five for each, the last of two samples."""

Outcome = tuple[list[Tensor], list[int]]


class Towers(pl.LightningModule):
    """Two towers with dropout and batch norm; keeps what it sees and logs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        self.head = nn.Linear(12, 3)
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        a, b, y = batch
        logits = self.head(torch.cat([self.left(a), self.right(b)], dim=1))
        self.seen.append(logits.detach())
        return nn.functional.cross_entropy(logits, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 3)]
    data = list(zip(*rows, torch.randint(0, 3, (SAMPLES,), generator=generator), strict=True))
    return DataLoader(data, batch_size=4)


def fit(rank: int, folder: str, graphs: bool | str, devices: int, world: int, options: dict[str, Any]) -> Outcome:
    """Train, save, and go on from the checkpoint. Returns what the step's process saw, and the records made."""
    tapes: list[Tape] = []

    def recorder_of(device: torch.device) -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    setup.recorder_of, setup.streams_on = recorder_of, lambda device: Histories()
    stages = [{"modules": ["left"], "devices": [devices - 1]}, {"modules": ["right", "head", "@step"], "devices": [0]}]
    seen: list[Tensor] = []
    for epochs, resumed in ((2, None), (3, f"{folder}/last.ckpt")):
        module = Towers().double()
        strategy = harness.strategy(stages=stages, num_micro_batches=2, seed=3, cuda_graphs=graphs, **options)
        trainer = harness.trainer(
            strategy,
            world,
            max_epochs=epochs,
            gradient_clip_val=0.3,
            accumulate_grad_batches=2,
            default_root_dir=folder,
        )
        trainer.fit(module, loader(), loader(), ckpt_path=resumed)
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        seen += [*module.seen, *(value.clone() for value in module.state_dict().values() if not value.is_meta)]
    return seen, [tape.count for tape in tapes]


@pytest.mark.parametrize(
    ("world", "devices", "options"),
    [
        pytest.param(1, 1, {"schedule": "zb_h1", "concurrent_stages": 2}, marks=pytest.mark.acceptance),
        (2, 2, {}),
        pytest.param(2, 1, {"sharding": "zero1", "concurrent_stages": 2}, marks=pytest.mark.acceptance),
    ],
    ids=["one device, split backward", "two devices", "two pipelines"],
)
def test_training_is_the_same(tmp_path: Path, world: int, devices: int, options: dict[str, Any]) -> None:
    cases = [(str(tmp_path), graphs, devices, world, options) for graphs in (False, True)]
    plain, recorded = harness.run_each(world, fit, cases)
    for (expected, none), (actual, records) in zip(plain, recorded, strict=True):
        assert none == []
        assert len(records) == 2
        assert min(records) > 0
        assert len(actual) == len(expected)
        for one, other in zip(expected, actual, strict=True):
            assert torch.equal(one, other)


def halves(batch: Any, number: int) -> list[Any]:
    return [tuple(tensor[:2] for tensor in batch), tuple(tensor[2:] for tensor in batch)]


def divided(rank: int) -> list[str]:
    setup.recorder_of = lambda device: Tape()
    stages = {"left": 0, "right": 0, "head": 0}
    strategy = harness.strategy(stages=stages, num_micro_batches=2, micro_batch_by=halves, cuda_graphs=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harness.trainer(strategy, max_epochs=1).fit(Towers().double(), loader())
    return [str(each.message) for each in caught]


def test_a_demand_that_records_nothing_is_told() -> None:
    (told,) = harness.run(1, divided)
    assert any("records nothing, because micro-batches have sizes of their own" in text for text in told)


def without_gpu(rank: int) -> list[str]:
    messages = []
    for wanted in (True, "auto"):
        trainer = harness.trainer(harness.strategy(stages={"left": 0, "right": 0, "head": 0}, cuda_graphs=wanted))
        try:
            trainer.fit(harness.make_module(), harness.loader())
            messages.append("trained")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_it_needs_a_gpu() -> None:
    ((refused, trained),) = harness.run(1, without_gpu)
    assert "strategy.cuda_graphs=auto" in refused
    assert trained == "trained"
