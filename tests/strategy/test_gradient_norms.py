"""Hooks that combine the gradients of all stages: their norms are those of one process."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_gpp.errors import ForeignTensorError
from tests.strategy import harness

ORDERS = (1.0, 2.0, math.inf)


def norms_of(module: nn.Module) -> list[list[float]]:
    """All norms of all gradients, by several functions."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [
        [float(gradient.norm(order)) for gradient in gradients for order in ORDERS],
        [float(gradient.detach().data.norm()) for gradient in gradients],
        [float(norm) for norm in torch._foreach_norm(gradients, 1.0)],
        list(map(float, grad_norm(module, "inf").values())),
    ]


class Looks(harness.TwoTowers):
    """Looks at all gradients, and changes them; `spare` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.found: list[Any] = []

    def on_after_backward(self) -> None:
        self.found.append(norms_of(self))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3.0).div_(torch.tensor(2.0))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.found.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.02)))


class Watches(pl.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found.append(norms_of(pl_module))


def fitted(rank: int, devices: int, strategy: Any = None) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    module, callback = Looks().double(), Watches()
    given = harness.strategy(self_check=False) if strategy is None else strategy
    trainer = harness.trainer(given, devices, max_epochs=1, callbacks=[callback])
    trainer.fit(module, harness.loader())
    assert all("on_after_backward" not in vars(owner) for owner in (module, callback))
    return module.found, callback.found


def flat(found: Any) -> list[float]:
    return [value for each in found for value in flat(each)] if isinstance(found, list | tuple) else [found]


def test_norms_are_those_of_one_process() -> None:
    expected = flat(harness.run(1, fitted, 1, "auto"))
    for found in harness.run(2, fitted, 2):
        assert flat(found) == pytest.approx(expected, rel=1e-9)


class Squares(harness.TwoTowers):
    """Combines gradients in another way than by their norms."""

    def on_after_backward(self) -> None:
        float(torch.stack([p.grad.square().sum() for p in self.parameters() if p.grad is not None]).sum())


class ChangesFirst(harness.TwoTowers):
    """Changes gradients, so that their norms are not known any more."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).sum())


def refused(rank: int, kind: type[pl.LightningModule]) -> str:
    trainer = harness.trainer(harness.strategy(self_check=False), 2, max_epochs=1)
    with pytest.raises(ForeignTensorError) as caught:
        trainer.fit(kind().double(), harness.loader())
    return str(caught.value)


@pytest.mark.parametrize("kind", [Squares, ChangesFirst])
def test_other_combinations_are_refused(kind: type[pl.LightningModule]) -> None:
    for message in harness.run(2, refused, kind):
        assert "self.trainer.strategy.grad_norm()" in message
