"""Saving in the background: training goes on, failures are raised, older checkpoints stay until newer are there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_gpp.checkpoints import folder as folders
from lightning_gpp.checkpoints.convert import ordinary
from lightning_gpp.checkpoints.saver import Saver, on_host
from lightning_gpp.errors import CheckpointError, ConfigError
from tests.checkpoints.differences import differences
from tests.strategy import harness
from tests.strategy.harness import loader, make_module


def test_a_staged_checkpoint_does_not_change() -> None:
    weight, log = torch.ones(3), [1]
    checkpoint = {"a": weight, "tied": weight, "log": log, "deep": [{"x": torch.zeros(2, dtype=torch.int32)}]}
    staged = on_host(checkpoint)
    weight.zero_()
    log.append(2)
    assert staged["a"] is staged["tied"]
    assert staged["a"].tolist() == [1, 1, 1]
    assert staged["log"] == [1]


def test_one_writing_at_a_time_and_removal_afterwards() -> None:
    saver, go, done = Saver(background=True), threading.Event(), []
    saver.run(lambda: done.append(go.wait(30)))
    saver.afterwards(lambda: done.append("removed"))
    assert done == []
    go.set()
    saver.run(lambda: None)
    assert done == [True, "removed"]
    saver.wait()


def test_the_error_of_a_writing_is_raised_later_and_nothing_is_removed() -> None:
    saver, removed = Saver(background=True), []
    saver.run(lambda: 1 / 0)
    saver.afterwards(lambda: removed.append(1))
    with pytest.raises(ZeroDivisionError):
        saver.wait()
    assert not removed
    saver.wait()


class Watching(ModelCheckpoint):
    """Notes which checkpoints are there after every step."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, filename="{step}", save_top_k=1, monitor="step", mode="max", every_n_train_steps=3)
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.seen.append(sorted(name for name in os.listdir(self.dirpath or "") if not name.startswith(".")))


def fit(rank: int, folder: str) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    complete = folders._complete  # of a slow disk
    folders._complete = lambda *args: (time.sleep(1.0), complete(*args))[1]
    module, watching = make_module(), Watching(folder)
    strategy = harness.strategy(state_dict_type="sharded", async_save=True)
    trainer = harness.trainer(strategy, 2, max_epochs=4, callbacks=[watching], enable_checkpointing=True)
    trainer.fit(module, loader(24))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/again.ckpt")
    return {"seen": watching.seen, "best": watching.best_model_path}


def test_training_goes_on_and_an_older_checkpoint_stays_until_the_newer_is_there(tmp_path: Path) -> None:
    report, _ = harness.run(2, fit, str(tmp_path))
    assert report["seen"][2] == [], "the first one is still being written"
    assert report["seen"][8] == ["step=3.ckpt", "step=6.ckpt"] or report["seen"][8] == ["step=6.ckpt"]
    assert all(seen for seen in report["seen"][5:])
    assert ordinary(report["best"])["global_step"] == 12
    after, again = (ordinary(tmp_path / f"{name}.ckpt") for name in ("after", "again"))
    assert after["global_step"] == 12
    assert not list(differences(after["state_dict"], again["state_dict"]))


def averaged_in_folders(rank: int) -> str:
    strategy = harness.strategy(state_dict_type="sharded")
    trainer = harness.trainer(strategy, 2, max_epochs=1, callbacks=[EMAWeightAveraging(decay=0.9)])
    try:
        trainer.fit(make_module(), loader(8))
    except ConfigError as error:
        return str(error)
    return ""


def test_averaged_weights_and_folders_are_refused_before_training() -> None:
    for said in harness.run(2, averaged_in_folders):
        assert "strategy.state_dict_type=sharded does not go together with the callback WeightAveraging" in said


def fail_to_save(rank: int, folder: str) -> str:
    """Rank 1 cannot write its second checkpoint."""
    module = make_module()
    strategy = harness.strategy(state_dict_type="sharded", async_save=True)
    trainer = harness.trainer(strategy, 2, max_epochs=1)
    trainer.fit(module, loader(8))
    strategy._checkpoints.begin()
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    strategy._checkpoints.wait()
    if rank == 1:
        folders._Writer.write_data = _no_space
    module.head.weight.data.zero_()
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    try:
        strategy._checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def _no_space(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_all_ranks_raise_the_error_of_a_background_writing(tmp_path: Path) -> None:
    for message in harness.run(2, fail_to_save, str(tmp_path)):
        assert "last.ckpt cannot be written: No space left on device (rank 1)" in message
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert ordinary(tmp_path / "last.ckpt")["state_dict"]["head.weight"].abs().sum() > 0
