"""Hooks on gradients of parameters are refused where backwards are those of micro-batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_gpp import ConfigError
from tests.strategy import harness
from tests.strategy.harness import TwoTowers

REFUSED = r"head.weight have hooks on their gradients.*on_before_optimizer_step.*for p in self.parameters\(\)"


class Registers(Callback):
    """Registers a hook before or after set-up."""

    def __init__(self, late: bool) -> None:
        self.late = late

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not self.late:
            pl_module.head.weight.register_hook(lambda gradient: gradient)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.late:
            pl_module.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def refused(rank: int) -> None:
    for step, late in itertools.product(("micro_batches", "whole"), (False, True)):
        trainer = harness.trainer(harness.strategy(step=step), 2, callbacks=[Registers(late)])
        with pytest.raises(ConfigError, match=REFUSED):
            trainer.fit(TwoTowers().double(), harness.loader(), harness.loader())


def test_refused_with_the_hook_that_serves_instead() -> None:
    harness.run(2, refused)


class Clamps(TwoTowers):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)


def clamped(rank: int, devices: int) -> list[float]:
    torch.manual_seed(0)
    module = Clamps().double()
    trainer = harness.trainer(harness.strategy() if devices > 1 else "auto", devices)
    trainer.fit(module, harness.loader(), harness.loader())
    return module.losses


def test_that_hook_changes_gradients_of_mini_batches() -> None:
    for losses in harness.run(2, clamped, 2):
        assert losses == pytest.approx(clamped(0, 1), rel=1e-12)
