"""Other work runs while ranks wait for messages, and training does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_gpp import ConfigError, FillBubbles, GPPStrategy, ValidateInBubbles
from tests.strategy.harness import loader, make_module, run, run_each, strategy, trainer

PAUSE = 0.02
RAN: list[float] = []
"""What the pieces of this process drew."""


class Pause(torch.autograd.Function):
    """Takes time, as a large layer does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return gradients[0]


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Pause.apply(x)
        return y


def pieces(module: pl.LightningModule) -> Iterator[None]:
    """Pieces that draw random numbers."""
    while True:
        assert not torch.is_grad_enabled()
        RAN.append(float(torch.rand(())))
        yield


def train(rank: int, name: str, epochs: int = 2) -> tuple[list[float], int, dict[str, float]]:
    callbacks = {"nothing": [], "pieces": [FillBubbles(pieces)], "validation": [ValidateInBubbles(loader(20, 4))]}
    pl.seed_everything(3, verbose=False)
    module = make_module()
    module.left.append(Slow())
    module.validation_step = lambda batch, _: module.log("loss", module.loss(batch)[0])  # type: ignore[method-assign]
    module.right[0] = nn.Sequential(module.right[0], nn.Dropout(0.3))
    fit = trainer(strategy(), 2, callbacks=callbacks[name], limit_val_batches=0, max_epochs=epochs)
    fit.fit(module, loader())
    return module.losses, len(RAN), {name: float(value) for name, value in fit.callback_metrics.items()}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Any]]:
    cases = {"nothing": (), "pieces": (), "validation": (1,)}
    return dict(zip(cases, run_each(2, train, [(name, *epochs) for name, epochs in cases.items()]), strict=True))


def test_training_is_the_same(trained: dict[str, list[Any]]) -> None:
    plain = trained["nothing"][0][0]
    assert len(plain) == 6
    assert trained["pieces"][0][0] == plain
    assert trained["validation"][0][0] == plain[:3]


def test_pieces_run_where_a_rank_waits(trained: dict[str, list[Any]]) -> None:
    (_, on_first, _), (_, on_second, _) = trained["pieces"]
    assert on_first > 20  # it waits for the slow stage
    assert on_first > on_second


def test_a_copy_is_validated_with_the_weights_from_the_beginning_of_the_epoch(trained: dict[str, list[Any]]) -> None:
    module = make_module().eval()
    losses = [float(module.loss(batch)[0].detach()) for batch in loader(20, 4)]
    for _, _, metrics in trained["validation"]:
        assert metrics["before_epoch/loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)


def train_alone(rank: int) -> str:
    with pytest.raises(ConfigError) as raised:
        trainer(GPPStrategy(), callbacks=[FillBubbles(pieces)]).fit(make_module(), loader())
    return str(raised.value)


def test_one_process_has_no_bubbles() -> None:
    (message,) = run(1, train_alone)
    assert message.startswith("Only pipelines of two or more devices have bubbles")
