"""Hooks outside of mini-batches draw the random numbers of one process, on every rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.strategy.harness import TwoTowers, loader, run, strategy, trainer


class Noise(TwoTowers):
    """Starts layers anew."""

    def on_train_epoch_start(self) -> None:
        self.left[2].reset_parameters()
        self.head.reset_parameters()


class Decides(Callback):
    """Takes random decisions, by the generators of Python and of torch."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []

    def on_train_epoch_start(self, machine: Any, module: Any) -> None:
        frozen = random.random() < 0.5
        self.decisions.append(frozen)
        module.left.requires_grad_(not frozen)

    def on_validation_epoch_end(self, machine: Any, module: Any) -> None:
        if machine.sanity_checking:
            return
        drawn = torch.rand(2)
        self.decisions += drawn.tolist()
        module.log("drawn", drawn.sum())


def facts_of(given: Any, devices: int, rank: int = 0) -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)
    module, decides = Noise().double(), Decides()
    torch.manual_seed(5 + rank)
    random.seed(5 + rank)
    trainer(given, devices, callbacks=[decides]).fit(module, loader(shuffle=True), loader(10, seed=2))
    return module.losses, decides.decisions


def on_ranks(rank: int) -> tuple[list[float], list[Any]]:
    return facts_of(strategy(), 2, rank)


def test_as_on_one_process() -> None:
    losses, decisions = facts_of("auto", 1)
    for found, decided in run(2, on_ranks):
        assert decided == pytest.approx(decisions)
        assert found == pytest.approx(losses, rel=1e-10)
