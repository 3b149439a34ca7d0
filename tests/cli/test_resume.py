"""`ckpt_path=auto`: a run that is started again goes on from the newest checkpoint in its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_gpp.cli.job import checkpoint_of, newest_checkpoint
from lightning_gpp.errors import ConfigError
from tests.cli.commands import commands, composed

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


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for age, name in enumerate(("checkpoints/.saving/last.ckpt", "hpc_ckpt_1.ckpt", "checkpoints/last.ckpt")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "hpc_ckpt_1.ckpt")


def test_a_checkpoint_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path=none.ckpt does not exist"):
        checkpoint_of(composed("experiment=two_tower", "ckpt_path=none.ckpt"))
    assert checkpoint_of(composed("experiment=two_tower", "ckpt_path=last")) == "last"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    return {"step": torch.tensor(content["global_step"]), **content["state_dict"]}


@pytest.mark.acceptance
def test_the_same_command_goes_on(tmp_path: Path) -> None:
    common = ("train", *SHORT, "trainer.devices=1", "hydra.job.chdir=false")
    lines = [
        (*common, "hydra.run.dir=whole", "trainer.max_epochs=2"),
        (*common, "hydra.run.dir=parts", "trainer.max_epochs=2", "trainer.max_steps=3"),  # an epoch; T_max is the same
        (*common, "hydra.run.dir=parts", "trainer.max_epochs=2"),
    ]
    whole, first, second = commands(lines, cwd=tmp_path)
    assert [whole[0], first[0], second[0]] == [0, 0, 0], (whole, first, second)
    assert "has no checkpoint" in first[2]
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)
