"""Composes configurations, and runs the commands as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_gpp.cli import schema
from lightning_gpp.cli.app import config_folder

ROOT = Path(__file__).parents[2]


def composed(*overrides: str, name: str = "train") -> DictConfig:
    schema.register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def command(
    name: str, *arguments: str, cwd: Path, timeout: float = 55, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `gpp-<name>` in `cwd`; the result has the return code, what was printed, and the errors."""
    with subprocess.Popen(
        [sys.executable, "-m", f"lightning_gpp.cli.{name}", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
