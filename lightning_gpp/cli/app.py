"""Shared parts of the commands: config folders, Hydra, and the display of errors."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_gpp.cli import schema
from lightning_gpp.cli.stopping import EXIT_CODE, interruptible
from lightning_gpp.errors import GPPError

Command = Callable[[DictConfig], None]


def config_folder() -> Path:
    """The shipped configs: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def run(command: str, config_name: str, task: Command) -> None:
    """Compose the configuration from the command line and hand it to `task`; user errors end without a traceback."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises instead of printing a shortened traceback
    # Lightning 2.6 on newer torch: nothing that a user could change, and every process would say it
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    sys.argv.extend(quiet_overrides(os.environ))
    schema.register()
    failed: list[GPPError] = []
    try:
        with interruptible():
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=config_name)(
                _told(command, task, failed)
            )()
    except InstantiationException as error:
        if not isinstance(error.__cause__, GPPError):
            raise  # a constructor failed: its traceback says where
        print(f"{command}: {error.__cause__}", file=sys.stderr)
        sys.exit(1)
    except (GPPError, HydraException, OmegaConfBaseException) as error:
        print(f"{command}: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print(f"{command}: interrupted{' ' * bool(str(interrupt))}{interrupt}.", file=sys.stderr)
        sys.exit(EXIT_CODE)
    if failed:
        sys.exit(1)


def _told(command: str, task: Command, failed: list[GPPError]) -> Command:
    """The task, whose user errors are told at once and kept: Hydra would tell all overrides of the job before them.

    In a sweep they end it, which Hydra does.
    """

    @wraps(task)
    def told(config: DictConfig) -> None:
        try:
            task(config)
        except GPPError as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            print(f"{command}: {error}", file=sys.stderr)
            failed.append(error)

    return told


def quiet_overrides(environment: Mapping[str, str]) -> list[str]:
    """Overrides for all but the first process of torchrun or srun: only the first keeps a run folder."""
    if environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0":
        return []
    folder = tempfile.mkdtemp(prefix="gpp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.output_subdir=null"]


def explain(error: BaseException) -> str:
    """The messages of an error and of what caused it, and the keys that exist where one does not."""
    if isinstance(error, GPPError):
        return str(error)
    lines = (line for cause in _causes(error) for line in (str(cause).split("\n    full_key")[0], _keys(cause)))
    return "\n".join(dict.fromkeys(filter(None, lines)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _keys(error: BaseException) -> str:
    parent: Any = getattr(error, "parent_node", None)
    if not isinstance(parent, DictConfig) or getattr(error, "key", None) in parent:
        return ""
    group = str(getattr(error, "full_key", None) or "").rpartition(".")[0] or "the configuration"
    return f"Keys of {group}: {', '.join(sorted(str(key) for key in parent if not str(key).startswith('_')))}."
