"""Models as people train them: two processes have the losses of one, and each reaches the quality that it states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_gpp.cli.configured import built
from tests.cli.commands import command, composed
from tests.strategy import harness

pytest.importorskip("transformers")

QUALITY = {
    "clip": ("test/accuracy", 0.93),
    "translation": ("test/correct", 0.95),
    "recommender": ("test/area", 0.87),
    "captioning": ("test/correct", 0.85),
    "album": ("test/correct", 0.8),
    "sorting": ("test/correct", 0.95),
    "mixture": ("test/nats", -1.7),
    "diffusion": ("test/preferred", 0.9),
    "local_digits": ("test/accuracy", 0.93),
}
"""What is measured, and the least that is stated; a negative number is the most."""

SAMPLED = {"recommender"}


class Losses(L.Callback):
    """The losses of all steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train/loss"]))


def losses(name: str, devices: int) -> list[float]:
    """Of the first steps, with the model, the data and the strategy of the experiment."""
    config = composed(f"experiment={name}", "strategy.search_seconds=1", "strategy.num_micro_batches=2")
    L.seed_everything(1, verbose=False)
    module, data = built(config.model), built(config.data)
    strategy = built(config.strategy) if devices > 1 else "auto"
    callback = Losses()
    trainer = harness.trainer(
        strategy, devices, max_epochs=1, limit_train_batches=3, limit_val_batches=1, callbacks=[callback]
    )
    trainer.fit(module, data)
    return callback.seen


def pipeline(rank: int, name: str) -> list[float]:
    return losses(name, 2)


@pytest.mark.parametrize(
    "name", [each if each in SAMPLED else pytest.param(each, marks=pytest.mark.acceptance) for each in QUALITY]
)
def test_two_processes_have_the_losses_of_one(name: str) -> None:
    expected = losses(name, 1)
    assert len(expected) == 3
    for seen in harness.run(2, pipeline, name):
        assert seen == pytest.approx(expected, rel=1e-4)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", QUALITY)
def test_the_command_reaches_the_stated_quality(name: str, tmp_path: Path) -> None:
    quiet = ("trainer.enable_progress_bar=false", f"hydra.run.dir={tmp_path / 'run'}")
    result = command("train", f"experiment={name}", *quiet, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    metric, least = QUALITY[name]
    measured = json.loads((tmp_path / "run" / "metrics.json").read_text())[metric]
    assert measured >= least if least > 0 else measured <= -least
