"""The search for the largest batch size works on one process only."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_gpp import ConfigError
from tests.strategy.harness import TwoTowers, make_data, run, strategy, trainer


class Sized(TwoTowers):
    batch_size = 4
    validation_step = None  # type: ignore[assignment]  # with it Lightning's search needs data to validate on

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(40), batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(make_data(), batch_size=4)


def refused(rank: int, method: str) -> str:
    callbacks: Any = [] if method == "tune" else [BatchSizeFinder()]
    machine, module = trainer(strategy(), 2, callbacks=callbacks), Sized().double()
    with pytest.raises(ConfigError) as caught:
        Tuner(machine).scale_batch_size(module) if method == "tune" else getattr(machine, method)(module)
    return str(caught.value)


@pytest.mark.parametrize("method", ["fit", "test", "tune"])
def test_searches_are_refused_on_several_processes(method: str) -> None:
    for message in run(2, refused, method):
        assert "The callback BatchSizeFinder (trainer.callbacks; Tuner.scale_batch_size adds it)" in message
        assert "one of 2 processes" in message
        assert "gpp-plan" in message
        assert "trainer.devices=1" in message


def searched(rank: int) -> tuple[int, list[float]]:
    module = Sized().double()
    trainer(strategy(stages=None), callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)]).fit(module)
    return module.batch_size, module.losses


def test_one_process_searches() -> None:
    ((size, losses),) = run(1, searched)
    assert size == 4
    assert losses
