"""Pipelines in both directions, through the trainer: the numbers of plain Lightning on one process (float64)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from tests.strategy import harness
from tests.strategy.harness import loader, make_module
from tests.strategy.test_training import Report, assert_equal, plain, report


def fit(strategy: Any, devices: int) -> tuple[Report, list[tuple[tuple[int, ...], bool]]]:
    pl.seed_everything(7, verbose=False)
    module = make_module()
    trainer = harness.trainer(strategy, devices, gradient_clip_val=0.05)
    trainer.fit(module, loader(shuffle=True), loader(10, seed=2))
    plan = getattr(strategy, "plan", None)
    return report(module, trainer), [(stage.devices, stage.round_robin) for stage in plan.stages] if plan else []


def fit_as(rank: int, settings: dict[str, Any]) -> tuple[Report, list[tuple[tuple[int, ...], bool]]]:
    return fit(harness.strategy(**settings), 2)


CHIMERA = {"schedule": "chimera", "stages": [{"modules": ["left"]}, {"modules": ["right", "head", "@step"]}]}
BITPIPE = {"schedule": "bitpipe", "stages": [{"modules": [name]} for name in ("left", "right", "head", "@step")]}


@pytest.mark.parametrize("settings", [CHIMERA, {**CHIMERA, "sharding": "fsdp"}, {**BITPIPE, "sharding": "zero1"}])
def test_equals_plain_lightning(settings: dict[str, Any]) -> None:
    expected, _ = plain(fit, "auto", 1)
    for found, stages in harness.run(2, fit_as, settings):
        assert_equal(found, expected, whole=False)
        assert [(sorted(devices), in_turn) for devices, in_turn in stages[:-1]] == [([0, 1], True)] * len(stages[:-1])
        assert stages[-1] == ((0,), False)
