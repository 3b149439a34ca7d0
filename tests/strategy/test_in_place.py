"""Steps, stages and modules that change a received value in place, or keep its gradient, as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.strategy import harness

STAGES = {"first": 1, "second": 0}


class Plain(pl.LightningModule):
    """Two stages; hooks note what they see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.noted = list[float]()

    def between(self, h: Tensor) -> Tensor:
        return h

    def behind(self, h: Tensor) -> Tensor:
        return h

    def loss(self, batch: Any) -> Tensor:
        h = self.behind(self.second(self.between(self.first(batch[0]))))
        return h.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Relu(Plain):
    def between(self, h: Tensor) -> Tensor:
        return h.relu_()


class Arithmetic(Plain):
    def between(self, h: Tensor) -> Tensor:
        h += 1
        h /= 0.7
        return h

    def behind(self, h: Tensor) -> Tensor:
        h *= 2
        return h


class Places(Plain):
    def between(self, h: Tensor) -> Tensor:
        h[:, 0] = h[:, 1].detach()
        h.view(-1)[::2] += 0.5
        h.t()[1].mul_(0.5)
        return h


class BothUses(Plain):
    """The step reads what it changes, too."""

    def loss(self, batch: Any) -> Tensor:
        h = self.first(batch[0])
        h += 1
        return self.second(h).square().mean() + h.sum(1).square().mean()


class ByValue(Plain):
    """Changes a result in a branch that the recording does not take."""

    def behind(self, h: Tensor) -> Tensor:
        if float(h.detach().norm()) > 0:
            h.mul_(3)
        return h


class Result(Plain):
    """The result of a module is no leaf, keeps a gradient, and has hooks."""

    def behind(self, h: Tensor) -> Tensor:
        assert not self.training or (h.grad_fn is not None and not h.is_leaf)
        if self.training:
            h.retain_grad()
            h.register_hook(lambda gradient: 2 * gradient)
        return h


class InStage(Plain):
    """A module changes its argument, undivided or cut."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


KINDS = {kind.__name__: kind for kind in (Relu, Arithmetic, Places, BothUses, ByValue, Result, InStage)}
CUT = {"first": 1, "second.0": 1, "second.1": 1, "second.2": 0, "second.3": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "split": {},
    "recomputed": {"recompute": ["first"]},
    "zero bubble": {"schedule": "zb_h1"},
    "whole": {"step": "whole"},
}


def fit(strategy: Any, devices: int, kind: str) -> dict[str, Tensor]:
    module = KINDS[kind]().double()
    trainer = harness.trainer(strategy, devices)
    trainer.fit(module, harness.loader(16), harness.loader(8))
    found = {name: value.detach().clone() for name, value in module.state_dict().items() if not value.is_meta}
    return {**found, "val": trainer.callback_metrics["val"]}


def divided(rank: int, settings: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in KINDS:
        cut = {"stages": CUT} if kind == "InStage" and not settings else {"stages": STAGES}
        found[kind] = fit(harness.strategy(**{"num_micro_batches": 2, **cut, **settings}), 2, kind)
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.timeout(300)
def test_numbers_are_those_of_one_process(name: str) -> None:
    by_rank = harness.run(2, divided, SETTINGS[name], timeout=200.0)
    for kind in KINDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = fit("auto", 1, kind)
        for found in by_rank:
            wanted = {key: expected[key] for key in found[kind]}
            torch.testing.assert_close(found[kind], wanted, rtol=1e-12, atol=1e-13)
