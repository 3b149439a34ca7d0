"""`gpp-train`: one run, from the command line to a run folder with checkpoints, logs, plan and timeline."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.cli.app import Command, run
from lightning_gpp.errors import ConfigError

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of launchers other than Lightning."""


def main() -> None:
    run(_COMMAND)


_EXAMPLES = (
    ("gpp-train experiment=two_tower", "A shipped example, on four processes of this machine's CPU."),
    ("gpp-train experiment=two_tower trainer=gpu", "The same on all GPUs of this machine."),
    ("gpp-train experiment=two_tower strategy=ddp", "The same with Lightning's data parallelism, to compare."),
    ("gpp-train experiment=two_tower debug=default", "A few batches only, to find mistakes."),
    ("gpp-train experiment=two_tower strategy.plan=plan.yaml", "With a plan that gpp-plan has written."),
    ("gpp-train data=mine model=mine", "Your own configs/data/mine.yaml and configs/model/mine.yaml."),
    ("gpp-train experiment=two_tower task=test ckpt_path=best.ckpt", "Only the test: or validate, or predict."),
)


_ABOUT = (
    "Trains a LightningModule as a pipeline of stages that form a graph, and tests it. Model, data, trainer and "
    "strategy are configuration files; the run folder gets checkpoints, metrics, the plan and its simulated timeline."
)


def train(config: DictConfig) -> None:
    """Train and test the configured model.

    Raises:
        ConfigError: the configuration cannot work.
    """
    check_sweep(config, os.environ)
    from lightning_gpp.cli.job import run_job  # takes seconds to load, which refusals above should not wait for

    run_job(config)


def check_sweep(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Refuse a sweep whose jobs start processes of their own by running its command again: each would be a sweep.

    Raises:
        ConfigError: with the launchers that start processes otherwise.
    """
    launched = any(name in environment for name in LAUNCHERS) or str(config.trainer.devices) == "1"
    if HydraConfig.get().mode is RunMode.MULTIRUN and not launched:
        raise ConfigError(
            f"--multirun with trainer.devices={config.trainer.devices}: the processes that a job starts would start "
            "the sweep again. hydra/launcher=slurm makes each run a job of SLURM; on one machine write a loop in the "
            "shell: for rate in 1e-3 3e-3; do gpp-train model.learning_rate=$rate ...; done"
        )


_COMMAND = Command(name="gpp-train", config="train", about=_ABOUT, examples=_EXAMPLES, task=train)

if __name__ == "__main__":
    main()
