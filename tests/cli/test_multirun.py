"""Sweeps: every job is a command with processes of its own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from lightning_gpp.cli.sweep import optimized
from lightning_gpp.errors import ConfigError
from tests.cli.commands import command
from tests.interpreter import Program

QUICK = (
    "experiment=feature_towers",
    "debug=default",
    "trainer.devices=2",
    "trainer.enable_progress_bar=false",
    "strategy.self_check=false",
    "test=false",
)


@pytest.mark.acceptance
def test_each_job_of_a_sweep_has_its_own_processes_and_metrics(tmp_path: Path) -> None:
    sweep = ("--multirun", *QUICK, "seed=1,2", "optimized_metric=val/loss", "hydra.sweep.dir=sweep")
    result = command("train", *sweep, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Run folder: ") == 2
    folders = [tmp_path / "sweep" / name for name in ("0", "1")]
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert metrics[0]["val/loss"] != metrics[1]["val/loss"]
    assert all((folder / "checkpoints" / "last.ckpt").is_file() for folder in folders)


@pytest.mark.acceptance
def test_optuna_minimises_the_metric(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=sweep")
    arguments = ("--multirun", *QUICK, *sweeper, "model.learning_rate=interval(1e-4,1e-2)", "optimized_metric=val/loss")
    result = command("train", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [json.loads((tmp_path / "sweep" / name / "metrics.json").read_text())["val/loss"] for name in "01"]
    assert yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())["best_value"] == min(losses)


LOGGERS = {
    "csv": ("lightning", "**/logs/metrics.csv"),
    "tensorboard": ("tensorboard", "**/tensorboard/events.out.*"),
    "wandb": ("wandb", "**/wandb/offline-run-*/*.wandb"),
    "mlflow": ("mlflow", "mlflow.db"),
}
"""Packages that loggers need, and files that they write."""


@pytest.mark.acceptance
@pytest.mark.parametrize("logger", LOGGERS)
def test_loggers_write_what_they_are_for(logger: str, tmp_path: Path) -> None:
    package, file = LOGGERS[logger]
    pytest.importorskip(package)
    result = command("train", *QUICK, f"logger={logger}", cwd=tmp_path, WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob(file))


def test_a_job_that_fails_ends_the_sweep_with_its_message(tmp_path: Path) -> None:
    result = command("train", "--multirun", *QUICK, "ckpt_path=none.ckpt", "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1
    assert "ckpt_path=none.ckpt does not exist" in result.stderr.split("The sweep ends, because its job")[0]
    assert result.stderr.count("The sweep ends, because its job") == 1
    assert "Error executing job" not in result.stderr
    assert not list(tmp_path.rglob("1/config"))  # the second job has not been started
    assert "seed=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interrupt_ends_the_job_and_the_sweep(tmp_path: Path) -> None:
    arguments = ("--multirun", *QUICK, "seed=1,2", "hydra.sweep.dir=sweep")
    program = Program("-m", "lightning_gpp.cli.train", *arguments, cwd=tmp_path)
    while not (tmp_path / "sweep" / "0" / "config").exists() and program.running:
        time.sleep(0.1)  # until the first job has been composed
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    code, output = program.outcome(50)
    assert code == 130, output
    assert not (tmp_path / "sweep" / "1").exists()


def test_jobs_on_several_machines_need_a_launcher(tmp_path: Path) -> None:
    result = command("train", "--multirun", *QUICK, "trainer.num_nodes=2", cwd=tmp_path)
    assert result.returncode == 1
    assert "hydra/launcher=submitit_slurm" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_optimized_metric_is_one_that_was_logged() -> None:
    assert optimized({"val/loss": 0.5}, "val/loss") == 0.5
    assert optimized({"val/loss": 0.5}, None) is None
    with pytest.raises(ConfigError, match="optimized_metric=loss was not logged. There are: val/loss"):
        optimized({"val/loss": 0.5}, "loss")
