"""`gpp-train` as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_gpp.cli.app import quiet_overrides
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from tests.cli.commands import called, command, launched

SHORT = ("experiment=feature_towers", "debug=default", "trainer.enable_progress_bar=false")


def test_a_pipeline_leaves_a_run_folder(tmp_path: Path) -> None:
    quick = ("strategy.self_check=false", "trainer.detect_anomaly=false", "trainer.num_sanity_val_steps=0")
    result = command("train", *SHORT, *quick, "trainer.devices=2", "trainer.enable_model_summary=false", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs" / "debug").iterdir()
    assert result.stdout.count(f"Run folder: {folder}") == 1
    assert result.stdout.count("One mini-batch, simulated") == 1
    assert result.stdout.count("test/accuracy") == 1
    assert result.stderr.count("`Trainer.fit` stopped") == 1
    names = {path.name for path in folder.iterdir()}
    assert names >= {"checkpoints", "logs", "config", "plan.yaml", "timeline.txt", "timeline.json"}
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert "train/loss" in (folder / "logs" / "version_0" / "metrics.csv").read_text()
    assert "<svg" in (folder / "report.html").read_text()
    assert Plan.load(folder / "plan.yaml").num_devices == 2


def test_one_process_needs_no_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ("strategy=single_device", "trainer.devices=1", "hydra/job_logging=none")
    assert called(monkeypatch, "train", *SHORT, *alone, cwd=tmp_path) == 0
    (folder,) = (tmp_path / "runs" / "debug").iterdir()
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert not (folder / "plan.yaml").exists()


UNTESTED = """
import lightning as L
import torch

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 3))
"""


def test_a_module_without_a_test_is_only_trained(tmp_path: Path) -> None:
    (tmp_path / "untested.py").write_text(UNTESTED)
    for group in ("data", "model"):
        (tmp_path / "mine" / group).mkdir(parents=True)
        (tmp_path / "mine" / group / "mine.yaml").write_text(f"_target_: untested.{group.capitalize()}\n")
    alone = ("strategy=single_device", "trainer.devices=1", "trainer.max_epochs=1", "name=mine")
    result = command("train", "--config-dir", "mine", "data=mine", "model=mine", *alone, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "\rEpoch 0: 100%" in result.stdout  # the bar that files get
    assert "no test after training, as there is no Model.test_step and no Data.test_dataloader." in result.stderr
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    assert (folder / "metrics.json").is_file()


def test_what_all_ranks_refuse_is_told_once(tmp_path: Path) -> None:
    wrong = ("trainer.devices=2", "strategy.stages={nothing:0,nothing_else:1}")
    result = launched(2, "train", *SHORT, *wrong, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("gpp-train: strategy.stages names the module 'nothing'") == 1
    assert "Traceback" not in result.stderr


STUMBLING = """
from gpp_examples.feature_towers import FeatureTowers
class Model(FeatureTowers):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            raise RuntimeError("in the middle")
"""


@pytest.mark.acceptance
def test_what_ends_a_run_is_shown_once_on_its_rank(tmp_path: Path) -> None:
    (tmp_path / "stumbling.py").write_text(STUMBLING)
    result = command("train", *SHORT, "trainer.devices=2", "model._target_=stumbling.Model", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("[rank 0] The job ends. First cause: rank 0") == 1
    assert result.stderr.count("Traceback") == 1
    (log,) = re.findall(r"gpp-train: The traceback is in (.*)\.$", result.stderr, re.MULTILINE)
    assert "RuntimeError: in the middle" in Path(log).read_text()


def test_only_the_first_process_keeps_a_run_folder() -> None:
    for environment in ({}, {"RANK": "0"}, {"SLURM_PROCID": "0"}, {"LOCAL_RANK": "1"}):
        assert quiet_overrides(environment) == []
    for environment in ({"RANK": "3"}, {"SLURM_PROCID": "1"}):
        run, sweep, config = quiet_overrides(environment)
        assert run.startswith("hydra.run.dir=")
        assert sweep.startswith("hydra.sweep.dir=")
        assert config == "hydra.output_subdir=null"


def test_a_run_folder_with_a_name_is_that_of_all_processes() -> None:
    overrides = quiet_overrides({"SLURM_PROCID": "1"}, ["gpp-train", "seed=1", "hydra.run.dir=runs/first"])
    assert overrides == ["hydra.job.name=rank1", "hydra.output_subdir=null"]


def test_a_sweep_whose_jobs_start_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "--multirun with trainer.devices=4: the processes that a job starts would start the sweep again"
    with pytest.raises(ConfigError, match=refused):
        called(monkeypatch, "train", "--multirun", *SHORT, "seed=1,2", "hydra/job_logging=none", cwd=tmp_path)
