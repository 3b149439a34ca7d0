"""Validation, tests and prediction without a flush between mini-batches: the same results, and hooks in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gpp import Cluster, Device, GPPStrategy, Link
from lightning_gpp.cluster import Node
from lightning_gpp.errors import ConfigError
from tests.sampling import sample
from tests.strategy import harness

TOWERS = [
    {"name": "left", "modules": ["left"], "devices": [2]},
    {"name": "right", "modules": ["right"], "devices": [1]},
    {"name": "head", "modules": ["head", "@step"], "devices": [0]},
]
REPLICATED = [
    {"name": "left", "modules": ["left"], "devices": [2, 3]},
    {"name": "right", "modules": ["right"], "devices": [1], "micro_batch_size": 4},
    {"name": "head", "modules": ["head", "@step"], "devices": [0]},
]
BATCH = 8


class Towers(pl.LightningModule):
    """Two towers that draw random numbers in evaluation too, a head, and a record of what happens in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Noise())
        self.right = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
        self.head = nn.Linear(10, 3)
        self.double()
        self.events: list[tuple[Any, ...]] = []

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        a, b, number = batch
        self.events.append(("step", batch_idx, dataloader_idx, number[0].item()))
        return self(a, b) + 0.1 * torch.rand(len(a), 1, dtype=a.dtype)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("value", self.predict_step(batch, batch_idx, dataloader_idx).mean(), on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("value", self.predict_step(batch, batch_idx, dataloader_idx).std(), on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b, _ = batch
        return self(a, b).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and isinstance(batch, list):
            self.events.append(("trained on", batch[2][0].item()))
        return batch

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.events.append(("start", batch_idx, dataloader_idx))

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.events.append(("end", batch_idx, dataloader_idx))


class Noise(nn.Module):
    """Dropout that evaluation does not switch off."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, training=True)


class Endless(IterableDataset[Any]):
    """Samples whose number nobody knows in advance."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))


def samples(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(number, width, dtype=torch.float64, generator=generator) for width in (4, 3))
    return TensorDataset(a, b, torch.arange(number))


def loaders() -> list[DataLoader[Any]]:
    """Six mini-batches of 8 samples and one of 2, one mini-batch alone, and four of a number that nobody knows."""
    sets = (samples(50, 1), samples(BATCH, 2), Endless(samples(4 * BATCH, 3)))
    return [DataLoader(data, batch_size=BATCH) for data in sets]


def evaluated(rank: int, *given: Any) -> list[dict[str, Any]]:
    return [evaluated_once(streaming, *given) for streaming in (True, False)]


def evaluated_once(streaming: bool, stages: Any, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    module = Towers()
    given = {"num_micro_batches": 2, "failure_timeout": 60.0, "timeout": 120.0, "seed": 5, **settings}
    strategy = GPPStrategy(stages=stages, streaming=streaming, **given)
    trainer = harness.trainer(strategy, devices=world_size)
    predictions = trainer.predict(module, loaders())
    validated, tested = trainer.validate(module, loaders(), verbose=False), trainer.test(module, loaders()[:2])
    return {
        "predictions": [[None if p is None else p.tolist() for p in batches] for batches in predictions or []],
        "metrics": [*validated, *tested],
        "events": module.events,
    }


@pytest.mark.parametrize(
    ("stages", "world_size", "settings"),
    [
        pytest.param(TOWERS, 3, {}, marks=pytest.mark.acceptance),
        (REPLICATED, 4, {"schedule": "gpipe"}),
        pytest.param(TOWERS, 6, {"sharding": "zero1"}, marks=pytest.mark.acceptance),
    ],
    ids=["two towers", "replicas", "two pipelines"],
)
def test_results_and_hooks_are_those_with_a_flush(stages: Any, world_size: int, settings: dict[str, Any]) -> None:
    found = harness.run(world_size, evaluated, stages, world_size, settings)
    assert all(streamed == flushed for streamed, flushed in found)
    if world_size < 6:
        assert [len(batches) for batches in found[0][0]["predictions"]] == [7, 1, 4]


def fitted(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [fitted_once(streaming, settings) for streaming in (True, False)]


def fitted_once(streaming: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Training with validation in between, each on data whose number of mini-batches nobody knows."""
    module = Towers()
    given = {"num_micro_batches": 2, "failure_timeout": 60.0, "timeout": 120.0, "seed": 5, **settings}
    trainer = harness.trainer(
        GPPStrategy(stages=TOWERS, streaming=streaming, **given),
        devices=3,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    data = DataLoader(Endless(samples(5 * BATCH, 1)), batch_size=BATCH)
    trainer.fit(module, data, loaders()[1:])
    state = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    return {
        "state": state,
        "trained on": [e for e in module.events if e[0] == "trained on"],
        **trainer.callback_metrics,
    }


@pytest.mark.parametrize("weights", sample(["synchronous", "stash"], ["stash"]))
def test_validation_in_between(weights: str) -> None:
    found = harness.run(3, fitted, {"weights": weights})
    assert all(streamed == flushed for streamed, flushed in found)
    assert [number for _, number in found[0][0]["trained on"]] == 2 * [*range(0, 5 * BATCH, BATCH)]


def test_fsdp_is_refused_where_streaming_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"streaming=True does not go together with strategy.sharding=fsdp.*=auto"):
        GPPStrategy(streaming=True, sharding="fsdp")


def with_a_slow_device(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Training and prediction on stages of a partitioner where one of three devices is not worth its transfers."""
    fast, slow = (
        Device(name=name, memory_bytes=1e9, peak_flops={"float32": flops}, peak_bytes_per_second=flops)
        for name, flops in (("fast", 1e9), ("slow", 1e3))
    )
    nodes = [Node(device=fast, count=1), Node(device=slow, count=1), Node(device=fast, count=1)]
    cluster = Cluster.of_nodes("edge", nodes, Link(bytes_per_second=1e9))
    torch.manual_seed(0)
    module = harness.make_module()
    strategy = GPPStrategy(
        cluster=cluster, num_micro_batches=2, failure_timeout=60.0, timeout=120.0, max_replicas=1, **settings
    )
    trainer = harness.trainer(strategy, devices=3)
    trainer.fit(module, harness.loader())
    unused = strategy.plan.unused if strategy.plan is not None else None
    predictions = trainer.predict(module, harness.loader())
    return {"unused": unused, "losses": module.losses, "predictions": [p is not None for p in predictions or []]}


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"partitioner": "edgepipe"}, marks=pytest.mark.acceptance), {"idle_devices": True}],
    ids=["edgepipe", "idle_devices"],
)
def test_a_device_that_is_not_worth_it_stays_unused(settings: dict[str, Any]) -> None:
    results = harness.run(3, with_a_slow_device, settings)
    assert [result["unused"] for result in results] == [(1,)] * 3
    assert results[0]["predictions"] == [True] * 3
    assert results[1]["losses"] == pytest.approx(results[0]["losses"])
