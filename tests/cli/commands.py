"""Composes configurations, and runs the commands as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cli.task import predict, task_of
from lightning_gpp.config_files import config_folder
from lightning_gpp.plan import Plan
from lightning_gpp.simulation import Timeline
from tests import interpreter
from tests.distributed import PATIENCE
from tests.interpreter import ROOT

__all__ = ["ROOT", "called", "check_targets", "command", "commands", "composed", "launched", "make_plan"]


def composed(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def command(
    name: str, *arguments: str, cwd: Path, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `gpp-<name>` in `cwd`; the result has the return code, what was printed, and the errors."""
    module = f"lightning_gpp.cli.{name}"
    given = {**os.environ, **environment}
    return interpreter.run("-m", module, *arguments, cwd=cwd, timeout=timeout, environment=given)


def launched(
    number: int, name: str, *arguments: str, cwd: Path, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run `gpp-<name>` in so many processes, as torchrun does."""
    return interpreter.run_ranks(number, "-m", f"lightning_gpp.cli.{name}", *arguments, cwd=cwd, timeout=timeout)


def called(patch: pytest.MonkeyPatch, name: str, *arguments: str, cwd: Path) -> int | str | None:
    """Run `gpp-<name>` in this process, and return its exit code; what it changes in the process is undone."""
    patch.chdir(cwd)
    patch.setattr(sys, "argv", [f"gpp-{name}", *arguments])
    patch.setattr(sys, "path", [*sys.path])
    patch.setenv("HYDRA_FULL_ERROR", "1")
    for module in ("app", "plan"):
        patch.setattr(f"lightning_gpp.cli.{module}.end_with_reader", lambda: None)
    try:
        import_module(f"lightning_gpp.cli.{name}").main()
    except SystemExit as ended:
        return ended.code
    finally:
        HydraConfig.instance().cfg = None
    return 0


def commands(lines: Sequence[Sequence[str]], *, cwd: Path, timeout: float = PATIENCE) -> list[tuple[int, str, str]]:
    """Run commands one after the other: return codes, what was printed, and the errors."""
    ran = [command(*line, cwd=cwd, timeout=timeout) for line in lines]
    return [(result.returncode, result.stdout, result.stderr) for result in ran]


def check_targets(config: DictConfig) -> None:
    """Import every class and function that a configuration names."""
    for target in _targets(OmegaConf.to_container(config)):
        get_object(target)


def _targets(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from (value for key, value in content.items() if key == "_target_" and value != "???")
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _targets(value)


def make_plan(config: DictConfig) -> tuple[Plan, Timeline]:
    """The plan of a configuration, and its simulated timeline."""
    prediction = predict(task_of(config))
    return prediction.plan, prediction.timeline
