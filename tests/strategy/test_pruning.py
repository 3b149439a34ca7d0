"""Modules that were pruned before training train in stages, and ModelPruning works on one process only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch.nn.utils import prune

from lightning_gpp import ConfigError
from tests.strategy.harness import STAGES, loader, run, strategy, trainer
from tests.strategy.test_callbacks import Plain


class Adam(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def made() -> Adam:
    torch.manual_seed(0)
    return Adam().double()


def fitted(given: Any, devices: int, path: Path) -> dict[str, Any]:
    """A run of a module that is pruned before."""
    module, machine = made(), trainer(given, devices)
    for part, name in (module.left[0], "weight"), (module.head, "weight"), (module.head, "bias"):
        prune.l1_unstructured(part, name, amount=0.4)
    machine.fit(module, loader(16), loader(10, seed=2))
    machine.save_checkpoint(path)
    if machine.is_global_zero:
        prune.remove(module.left[0], "weight")
    values = {name: value for name, value in module.state_dict().items() if not value.is_meta}
    return {"losses": module.losses, "state": values}


def masked(given: Any, path: Path) -> dict[str, Any]:
    """A run of one process, whose callback prunes; it saves while there are masks."""
    callback = ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False)
    module, machine = made(), trainer(given, 1, callbacks=[callback], max_epochs=3)
    machine.fit(module, loader(16), loader(10, seed=2))
    machine.save_checkpoint(path)
    return {"losses": module.losses, "state": module.state_dict()}


def in_stages(rank: int, path: Path) -> dict[str, Any]:
    return fitted(strategy(stages=STAGES), 2, path)


def on_one(rank: int, path: Path, step: str) -> dict[str, Any]:
    return masked(strategy(stages=None, step=step), path)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def same_files(*paths: Path) -> None:
    here, there = (torch.load(path, weights_only=False) for path in paths)
    same(here["state_dict"], there["state_dict"])
    same(here["optimizer_states"], there["optimizer_states"])


def test_modules_that_were_pruned_before(tmp_path: Path) -> None:
    expected = fitted("auto", 1, tmp_path / "plain")
    found, other = run(2, in_stages, tmp_path / "stages")
    same(found, expected)
    assert other["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    same_files(tmp_path / "stages", tmp_path / "plain")


@pytest.mark.parametrize("step", ["micro_batches", "whole"])
def test_callbacks_prune_on_one_process(step: str, tmp_path: Path) -> None:
    expected = masked("auto", tmp_path / "plain")
    (found,) = run(1, on_one, tmp_path / "stages", step)
    same(found, expected)
    same_files(tmp_path / "stages", tmp_path / "plain")


def refused(rank: int) -> str:
    machine = trainer(strategy(), 2, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(ConfigError) as caught:
        machine.fit(made(), loader(16))
    return str(caught.value)


def test_callbacks_are_refused_on_several_processes() -> None:
    for message in run(2, refused):
        assert "The callback ModelPruning (trainer.callbacks)" in message
        assert "each of 2 processes" in message
        assert "Prune the module before trainer.fit" in message
        assert "trainer.devices=1" in message
