"""Batches with texts and numbers of samples that are no tensors, which the step passes to modules as they are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import CaptureError
from tests.strategy import harness


class Net(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.reads = nn.Linear(4, 8), nn.Linear(8, 2), reads

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = self.first(batch["x"]).tanh()
        if self.reads:
            hidden = hidden + torch.tensor([len(name) for name in batch["name"]]).unsqueeze(1)
        return self.second(hidden)


class Model(pl.LightningModule):
    """`tail`: with another module, so that `net` does not have all parameters."""

    def __init__(self, reads: bool = False, tail: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.tail = Net(reads), nn.Linear(2, 2) if tail else nn.Identity()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert [len(name) for name in batch["name"]] == [1 + number % 3 for number in batch["number"]]
        loss = (self.tail(self.net(batch)) - batch["y"]).square().mean()
        self.log("loss", loss, batch_size=len(batch["name"]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    """With a tuple of texts and a list of numbers."""
    tensors = {key: torch.stack([item[key] for item in items]) for key in ("x", "y")}
    return tensors | {"name": tuple(item["name"] for item in items), "number": [item["number"] for item in items]}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, width, dtype=torch.float64, generator=generator) for width in (4, 2))
    items = [{"x": x[n], "y": y[n], "name": "a" * (1 + n % 3), "number": n} for n in range(16)]
    return DataLoader(items, batch_size=8, collate_fn=collated)


def trained(devices: int, model: tuple[bool, bool], step: str = "micro_batches") -> float:
    stages = {"net.first": 1, "net.second": 0} | ({"tail": 0} if model[1] else {})
    strategy = harness.strategy(stages=stages, num_micro_batches=4, step=step) if devices > 1 else "auto"
    made = harness.trainer(strategy, devices)
    made.fit(Model(*model).double(), loader())
    return float(made.callback_metrics["loss"])


MODELS = [(False, False), (False, True), (True, False)]


def trained_in_stages(rank: int) -> list[float]:
    return [trained(2, model) for model in MODELS] + [trained(2, model, "whole") for model in MODELS[:2]]


def test_a_batch_with_names_may_go_to_modules() -> None:
    """Where the module has all parameters, it may read them: it counts as a part of the step."""
    expected = [trained(1, model) for model in (*MODELS, *MODELS[:2])]
    for found in harness.run(2, trained_in_stages):
        assert found == pytest.approx(expected, rel=1e-12)


def test_forwards_on_other_devices_may_not_read_them() -> None:
    with pytest.raises(CaptureError, match="reads texts or numbers of the batch that are no tensors"):
        capture_step(Model(reads=True, tail=True).double(), next(iter(loader())))


def refused_as_a_whole(rank: int) -> None:
    with pytest.raises(CaptureError, match="reads texts or numbers of the batch that are no tensors"):
        trained(2, (True, False), "whole")


def test_calls_of_whole_steps_may_not_read_them() -> None:
    harness.run(2, refused_as_a_whole)
