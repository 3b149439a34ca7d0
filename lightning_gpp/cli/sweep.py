"""A sweep on one machine: every job is a command of its own, so that its processes do not start the sweep again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.errors import ConfigError, GPPError

METRICS = "metrics.json"
"""File in the run folder with the last value of every logged metric."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a sweep that its present job gets, and after which the sweep ends with the job."""

EXTERNAL_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of launchers other than Lightning."""


def is_sweep() -> bool:
    """True if this is a job of a sweep whose processes nobody else starts."""
    return HydraConfig.get().mode is RunMode.MULTIRUN and not any(name in os.environ for name in EXTERNAL_LAUNCHERS)


def run_alone(config: DictConfig) -> dict[str, float]:
    """Run a job of a sweep in processes of its own. Returns the metrics that it leaves in its run folder.

    Raises:
        ConfigError: the job needs several machines.
        GPPError: the job failed.
        SystemExit: a signal ended the job, and ends the sweep.
    """
    if config.trainer.num_nodes != 1:
        raise ConfigError(
            f"--multirun with trainer.num_nodes={config.trainer.num_nodes}: a sweep starts the processes of one "
            "machine only. A launcher starts those of several: hydra/launcher=submitit_slurm "
            "hydra.launcher.nodes=N hydra.launcher.tasks_per_node=N."
        )
    folder = Path(config.paths.output_dir)
    arguments = _arguments(HydraConfig.get(), folder)
    process = subprocess.Popen([sys.executable, "-m", "lightning_gpp.cli.train", *arguments], start_new_session=True)
    with _forwarding(process) as received:
        code = process.wait()
    if received:
        sys.exit(code if code > 0 else 128 + received[0])
    if code:
        overrides = shlex.join(HydraConfig.get().overrides.task)
        raise GPPError(f"The sweep ends, because its job {overrides} ended with exit code {code}.")
    metrics: dict[str, float] = json.loads((folder / METRICS).read_text())
    return metrics


def _arguments(hydra: Any, folder: Path) -> list[str]:
    """The command line of the job: what the sweep's has, without the sweep."""
    arguments = ["--config-name", str(hydra.job.config_name)]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            arguments += ["--config-dir", str(source.path)]
    return [*arguments, *hydra.overrides.task, f"hydra.run.dir={folder}", "hydra.mode=RUN"]


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[Sequence[int]]:
    """Inside, the process gets the signals; yields their numbers."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def optimized(metrics: Mapping[str, float], name: str | None) -> float | None:
    """The metric that a sweeper optimises; None if there is none.

    Raises:
        ConfigError: nothing of that name was logged.
    """
    if name is None:
        return None
    if name not in metrics:
        raise ConfigError(f"optimized_metric={name} was not logged. There are: {', '.join(sorted(metrics)) or 'none'}.")
    return metrics[name]
