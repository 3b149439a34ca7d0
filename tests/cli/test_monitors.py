"""Monitors of callbacks that are misspelt are noticed before training."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_gpp.cli.monitors import Monitors
from tests.strategy import harness


@pytest.mark.parametrize(("monitor", "meant"), [("val_los", "val_loss"), ("val_loss", ""), ("train_loss", "")])
def test_a_misspelt_monitor(tmp_path: Path, monitor: str, meant: str) -> None:
    watching = [EarlyStopping(monitor, strict=False), ModelCheckpoint(tmp_path), Monitors()]
    trainer = harness.trainer(max_steps=1, callbacks=watching, enable_checkpointing=True, num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(harness.make_module(), harness.loader(), harness.loader(16))
    told = [str(warning.message) for warning in caught if "which validation does not log" in str(warning.message)]
    assert len(told) == bool(meant)
    assert all(f"EarlyStopping has monitor={monitor}" in text for text in told)
    assert all(text.endswith(f"Did you mean {meant}?") for text in told)


def test_a_misspelt_monitor_of_a_pipeline() -> None:
    told, silent = harness.run(2, warnings_of_a_pipeline)
    assert [text.endswith("Did you mean val_loss?") for text in told] == [True]
    assert silent == []


def warnings_of_a_pipeline(rank: int) -> list[str]:
    watching = [EarlyStopping("val_los", strict=False), Monitors()]
    trainer = harness.trainer(harness.strategy(), 2, max_steps=1, callbacks=watching, num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(harness.make_module(), harness.loader(), harness.loader(16))
    return [str(each.message) for each in caught if "which validation does not log" in str(each.message)]
