"""Modules that write into the containers that they get: a batch that goes from module to module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp.capture import capture_step
from lightning_gpp.errors import CaptureError
from tests.strategy import harness

SAMPLES = 16


def mlp(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, outputs))


class Encoder(nn.Module):
    """`kind`: what it returns, and where it writes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = mlp(4, 6), kind

    def forward(self, batch: dict[str, Any], found: list[Tensor], *, options: dict[str, Any]) -> Any:
        hidden = self.layers(batch["x"])
        found.append(hidden)
        options["inner"]["scaled"] = hidden * options["inner"].pop("scale")
        if self.kind != "list":
            batch["hidden"], batch["size"] = hidden, 6
        return batch if self.kind == "returned" else (batch, hidden) if self.kind == "nested" else hidden


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(6, 2)

    def forward(self, batch: dict[str, Any], found: list[Tensor]) -> dict[str, Any]:
        batch["hidden"] = self.layers(batch.get("hidden", found[-1]))
        found[0] = found[0] + 1.0
        return batch


class Model(pl.LightningModule):
    def __init__(self, kind: str, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.kind = Encoder(kind), Head(), kind
        self.automatic_optimization = not manual

    def loss(self, batch: dict[str, Any]) -> Tensor:
        assert "hidden" not in batch
        found: list[Tensor] = []
        options = {"inner": {"scale": 2.0}}
        result = self.encoder(batch, found, options=options)
        batch = result if self.kind == "returned" else result[0] if self.kind == "nested" else batch
        same = self.head(batch, found)
        assert same is batch
        assert list(options["inner"]) == ["scaled"]
        assert batch.get("size", 6) == 6
        distance = (batch["hidden"] - batch["y"]).square().mean()
        return distance + 0.1 * (options["inner"]["scaled"].square().mean() + found[0].square().mean())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True, on_step=False, batch_size=8)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("validation", self.loss(batch), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Found:
    """An object with attributes instead of a dictionary."""

    x: Tensor
    y: Tensor
    hidden: Any = None


def loader(objects: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES, width, dtype=torch.float64, generator=generator) for width in (4, 2))
    return DataLoader(
        [{"x": a, "y": b} for a, b in zip(x, y, strict=True)], batch_size=8, collate_fn=as_object if objects else None
    )


def as_object(items: list[dict[str, Tensor]]) -> Found:
    return Found(*(torch.stack([item[key] for item in items]) for key in ("x", "y")))


STAGES: dict[str, Any] = {
    "by_module": [{"modules": ["encoder"], "devices": [1]}, {"modules": ["head", "@step"], "devices": [0]}],
    "inside": [
        {"modules": ["encoder.layers.0"], "devices": [0]},
        {"modules": ["encoder", "head.layers.0"], "devices": [1]},
        {"modules": ["head", "@step"], "devices": [0]},
    ],
}


def trained(strategy: Any, devices: int, kind: str, manual: bool, objects: bool = False) -> dict[str, float]:
    module = (ObjectModel if objects else Model)(kind, manual).double()
    made = harness.trainer(strategy, devices)
    made.fit(module, loader(objects), loader(objects))
    return {name: float(value) for name, value in made.callback_metrics.items()}


class OfAttributes(nn.Module):
    def __init__(self, layers: nn.Module, source: str) -> None:
        super().__init__()
        self.layers, self.source = layers, source

    def forward(self, found: Any) -> Any:
        found.hidden = self.layers(getattr(found, self.source))
        return found


class ObjectModel(Model):
    def __init__(self, kind: str, manual: bool = False) -> None:
        super().__init__(kind, manual)
        self.encoder, self.head = OfAttributes(mlp(4, 6), "x"), OfAttributes(mlp(6, 2), "hidden")

    def loss(self, batch: Any) -> Tensor:
        assert batch.hidden is None
        result = self.encoder(batch)
        self.head(result if self.kind == "returned" else batch)
        return (batch.hidden - batch.y).square().mean()


class InPlace(Head):
    def forward(self, batch: dict[str, Any], found: list[Tensor]) -> dict[str, Any]:
        found[0].add_(1.0)
        return super().forward(batch, found)


def test_a_tensor_that_a_call_changes_in_place_is_for_no_other_call() -> None:
    class Again(Model):
        def loss(self, batch: dict[str, Any]) -> Tensor:
            found: list[Tensor] = []
            self.encoder(batch, found, options={"inner": {"scale": 1.0}})
            self.head(batch, found)
            return super().loss({"x": self.head(batch, found)["x"], "y": batch["y"]})

    module = Again("filled").double()
    module.head = InPlace().double()
    with pytest.raises(CaptureError, match="'head' gets a dictionary, list or object in which an earlier module call"):
        capture_step(module, next(iter(loader())))


BY_MODULE = [("filled", False), ("nested", False), ("list", False), ("nested", True)]
INSIDE = [("returned", False), ("filled", False)]
OBJECTS = [("returned", False, True), ("filled", True, True)]


def trained_in_stages(rank: int, stages: str, kinds: list[Any]) -> list[dict[str, float]]:
    return [trained(harness.strategy(stages=STAGES[stages], num_micro_batches=2), 2, *kind) for kind in kinds]


@pytest.mark.parametrize(
    ("stages", "kinds"),
    [("by_module", BY_MODULE), ("inside", INSIDE), ("by_module", OBJECTS)],
    ids=["by_module", "inside", "objects"],
)
def test_what_modules_write_is_there_for_later_ones_and_for_the_step(stages: str, kinds: list[Any]) -> None:
    expected = [trained("auto", 1, *kind) for kind in kinds]
    for found in harness.run(2, trained_in_stages, stages, kinds):
        assert found == [pytest.approx(each, rel=1e-12) for each in expected]
