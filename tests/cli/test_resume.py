"""`ckpt_path=auto`: a run that is started again in its folder goes on from its newest complete checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gpp.cli.resume import newest_checkpoint, resuming_by_itself
from tests.cli.commands import ROOT, commands
from tests.strategy import harness

SHORT = (
    "experiment=feature_towers",
    "debug=default",
    "seed=3",
    "test=false",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.num_sanity_val_steps=0",
    "trainer.detect_anomaly=false",
    "strategy.self_check=false",
    "ckpt_path=auto",
    "data._target_=tests.cli.ordered.Ordered",
)


def save(path: Path, step: int, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"state_dict": {"w": torch.zeros(1000)}, "optimizer_states": [], "loops": {}, "global_step": step}
    torch.save({name: value for name, value in {**content, **changes}.items() if value is not None}, path)
    os.utime(path, (1e9 + step, 1e9 + step))
    return path


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert newest_checkpoint(tmp_path) is None
    last = save(tmp_path / "checkpoints" / "last.ckpt", 7)
    preempted = save(tmp_path / "hpc_ckpt_1.ckpt", 9)
    save(tmp_path / "checkpoints" / "weights.ckpt", 30, optimizer_states=None)
    half = save(tmp_path / "checkpoints" / "half.ckpt", 20)
    half.write_bytes(half.read_bytes()[:-100])
    save(tmp_path / "checkpoints" / ".last.ckpt.part", 40)
    save(tmp_path / ".hidden.ckpt", 40)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.step) == (preempted, 9)
    same_step = save(tmp_path / "hpc_ckpt_2.ckpt", 9)
    os.utime(same_step, (2e9, 2e9))
    assert getattr(newest_checkpoint(tmp_path), "path", None) == same_step
    for path in (preempted, same_step):
        path.unlink()
    assert getattr(newest_checkpoint(tmp_path), "path", None) == last


def weights(folder: Path) -> dict[str, torch.Tensor]:
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    return {"step": torch.tensor(content["global_step"]), **content["state_dict"]}


def in_folder(folder: str, max_epochs: int, rank: int) -> list[float]:
    """Losses of a run that goes on from what is in the folder; other ranks than 0 have no such folder."""
    module = harness.make_module()
    callbacks = [ModelCheckpoint(f"{folder}/checkpoints", save_last=True)]
    settings = {"max_epochs": max_epochs, "callbacks": callbacks, "enable_checkpointing": True}
    trainer = harness.trainer(harness.strategy(self_check=False), devices=2, **settings)
    with resuming_by_itself(trainer, folder if rank == 0 else "/nowhere"):
        trainer.fit(module, harness.loader(16))
    return module.losses


def started_again(rank: int, folder: str) -> tuple[list[float], list[float]]:
    undisturbed = in_folder(f"{folder}/whole", 2, rank)
    return undisturbed, in_folder(f"{folder}/parts", 1, rank) + in_folder(f"{folder}/parts", 2, rank)


def test_rank_0_chooses_and_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    for undisturbed, in_parts in harness.run(2, started_again, str(tmp_path)):
        assert len(undisturbed) == 4 or not undisturbed
        assert in_parts == undisturbed


@pytest.mark.acceptance
def test_the_same_command_goes_on(tmp_path: Path) -> None:
    common = ("train", *SHORT, "trainer.devices=1", "hydra.job.chdir=false")
    lines = [
        (*common, "hydra.run.dir=whole", "trainer.max_epochs=2"),
        (*common, "hydra.run.dir=parts", "trainer.max_epochs=2", "trainer.max_steps=3"),  # an epoch; T_max is the same
        (*common, "hydra.run.dir=parts", "trainer.max_epochs=2"),
        (*common, "train=false", "test=true"),
    ]
    whole, first, second, untrained = commands(lines, cwd=tmp_path)
    assert [whole[0], first[0], second[0]] == [0, 0, 0], (whole, first, second)
    assert "no checkpoint in" in first[2]
    assert "training goes on after step" in second[2]
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)
    assert untrained[0] == 1
    assert "ckpt_path=auto goes on with training, and train=false" in untrained[2]


def launched(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + ["-m", "lightning_gpp.cli.train", *SHORT, "trainer.devices=2", f"hydra.run.dir={folder}", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def killed_after(process: subprocess.Popen[str], checkpoint: Path) -> None:
    deadline = time.monotonic() + 100
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.acceptance
def test_a_killed_job_of_torchrun_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    epochs = ("trainer.max_epochs=12",)
    outputs = [launched(tmp_path / "whole", *epochs).communicate(timeout=150)[0]]
    killed_after(launched(tmp_path / "parts", *epochs), tmp_path / "parts" / "checkpoints" / "last.ckpt")
    outputs.append(launched(tmp_path / "parts", *epochs).communicate(timeout=150)[0])
    assert "training goes on after step" in outputs[1], outputs
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)
