"""Hooks between the announcement of a mini-batch and its step freeze and unfreeze: training is that of one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.strategy import harness

CHANGES = {
    "unfrozen": {0: (False, True), 2: (True, True)},
    "frozen": {1: (False, True)},
    "zeroed": {1: (False, True)},
    "back_and_forth": {1: (False, True), 2: (True, False), 3: (False, True), 5: (True, True)},
}
"""For each case the mini-batches before which the parts are frozen or unfrozen, and whether each is trained then."""
STAGES = {"first": 1, "second": 0, "head": 0}


class Freezing(pl.LightningModule):
    """Freezes and unfreezes its parts in `on_train_batch_start`, by the number of the mini-batch."""

    def __init__(self, case: str, momentum: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.case, self.momentum, self.number = case, momentum, 0
        self.losses: list[float] = []
        if case == "unfrozen":
            self.first.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        change = CHANGES[self.case].get(self.number)
        self.number += 1
        for part, trained in zip((self.first, self.second), change or (), strict=False):
            part.requires_grad_(trained)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.case != "zeroed")

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.second(self.first(batch[0]).tanh()).tanh()), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.loss(batch)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        if self.momentum:
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=self.momentum)
        return torch.optim.Adam(self.parameters(), lr=0.02)


class FrozenByStep(Freezing):
    """The step freezes a part for the next mini-batches, where it runs, and a hook unfreezes it, everywhere.

    On one process a hook does both, because a step that freezes loses its own gradient there.
    """

    in_stages = False

    def freeze(self) -> None:
        if self.number in (2, 5):
            self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.in_stages:
            self.freeze()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if not self.in_stages:
            self.freeze()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number += 1
        if self.number in (3, 7):
            self.first.requires_grad_(True)


def trained(case: str, strategy: Any, devices: int, momentum: float, **options: Any) -> tuple[list[float], list[float]]:
    """The losses, and the sums of the parameters at the end, which are complete on rank 0."""
    module = (FrozenByStep if case == "by_step" else Freezing)(case, momentum).double()
    module.in_stages = devices > 1
    trainer = harness.trainer(strategy, devices, num_sanity_val_steps=0, **options)
    trainer.fit(module, harness.loader(32), harness.loader(16))
    here = [parameter.detach() for parameter in module.parameters() if not parameter.is_meta]
    return module.losses, [float(parameter.sum()) for parameter in here]


def alone(case: str, momentum: float, **options: Any) -> tuple[list[float], list[float]]:
    return trained(case, "auto", 1, momentum, **options)


def in_stages(
    rank: int, kinds: list[tuple[str, float, dict[str, Any], dict[str, Any]]]
) -> list[tuple[list[float], list[float]]]:
    return [
        trained(case, harness.strategy(num_micro_batches=2, **options), 2, momentum, **given)
        for case, momentum, given, options in kinds
    ]


BY_HAND = {"stages": STAGES}
KINDS = [
    ("unfrozen", 0.0, {}, {"stages": None, "search_seconds": 0.2}),
    ("unfrozen", 0.9, {"accumulate_grad_batches": 2}, BY_HAND),
    ("frozen", 0.9, {"accumulate_grad_batches": 2}, BY_HAND),
    ("back_and_forth", 0.9, {"gradient_clip_val": 0.1}, BY_HAND),
    ("by_step", 0.9, {}, BY_HAND),
]


def test_training_is_that_of_one_process() -> None:
    found, _ = harness.run(2, in_stages, KINDS)
    for (case, momentum, given, _), (losses, sums) in zip(KINDS, found, strict=True):
        expected, parameters = alone(case, momentum, **given)
        assert losses == pytest.approx(expected, rel=1e-12), (case, given)
        assert sums == pytest.approx(parameters, rel=1e-12), (case, given)


def accumulated(loader: Any, strategy: Any = "auto", devices: int = 1, case: str = "frozen") -> list[float]:
    """The sums of the parameters at the end; gradients are accumulated unless they are set to zero, not None."""
    module = Freezing(case, 0.9).double()
    number = 1 if case == "zeroed" else 2
    trainer = harness.trainer(strategy, devices, num_sanity_val_steps=0, accumulate_grad_batches=number)
    trainer.fit(module, loader, harness.loader(16))
    return [float(parameter.detach().abs().sum()) for parameter in module.parameters()]


def in_pipelines(rank: int) -> list[list[float]]:
    options = {"stages": None, "num_pipelines": 2, "num_micro_batches": 2}
    kinds = [{**options, "sharding": sharding} for sharding in ("none", "zero1", "fsdp")]
    data = harness.make_data(64)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    found = [accumulated(loader, harness.strategy(**kind), 2) for kind in kinds]
    return [*found, accumulated(loader, harness.strategy(**kinds[1]), 2, "zeroed")]


def test_pipelines_sum_the_gradients_from_before_their_parameters_were_frozen() -> None:
    expected = [accumulated(harness.loader(64, 16), case=case) for case in ("frozen",) * 3 + ("zeroed",)]
    for found in harness.run(2, in_pipelines):
        for sums, wanted in zip(found, expected, strict=True):
            assert sums == pytest.approx(wanted, rel=1e-12)
