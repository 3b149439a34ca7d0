"""Shared parts of the commands: Hydra, the run folder, and the display of errors."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Final

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_gpp.cli.help import ASKED, VERSION, help_text
from lightning_gpp.cli.told import place_of_traceback, told
from lightning_gpp.config_files import config_folder
from lightning_gpp.errors import GPPError, is_shown_elsewhere
from lightning_gpp.user_code import with_user_lines
from lightning_gpp.wording import WORDS

log = logging.getLogger(__name__)

INTERRUPTED: Final = 130
"""The exit code of a command that Ctrl-C has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of this package.

    Args:
        name: the name that the user types.
        config: the configuration file that it composes.
        about: its description, in a sentence or two.
        examples: command lines with their purposes.
        task: called with the composed configuration.
    """

    name: str
    config: str
    about: str
    examples: Sequence[tuple[str, str]]
    task: Callable[[DictConfig], None]

    def tell(self, text: str) -> None:
        """Print a sentence for the user on standard error."""
        print(f"{self.name}: {text}", file=sys.stderr)


def run(command: Command) -> None:
    """Compose the configuration from the command line and hand it to the task; user errors end without a traceback."""
    if not sys.argv[1:] or set(ASKED) & set(sys.argv[1:]):
        end_with_reader()
        print(help_text(command.name, command.about, command.examples, command.config))
        return
    if "--version" in sys.argv[1:]:
        print(VERSION)
        return
    _prepare()
    job = _Job(command)
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=command.config)(job)()
    except KeyboardInterrupt as interrupt:
        command.tell(f"interrupted {interrupt}".rstrip() + ".")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if job.started:
            raise
        command.tell(told(error))  # the command line, or a configuration file
        sys.exit(1)
    if job.failed:
        sys.exit(1)


def end_with_reader() -> None:
    """Let this process end without a traceback when nobody reads on what it prints, as in `gpp-plan ... | head`."""
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _prepare() -> None:
    os.environ[WORDS] = "hydra"
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes Hydra raise instead of printing a shortened traceback
    # a warning of Lightning 2.6 on newer torch that users cannot change, from every process
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    sys.argv[1:] = in_order([*own_configs(sys.argv[1:]), *sys.argv[1:]])
    sys.argv.extend(quiet_overrides(os.environ, sys.argv))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules of the user's project; an installed command has only its own folder


class _Job:
    """The task as Hydra calls it. It shows user errors itself: Hydra would print all overrides of the job first."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.started = False
        self.failed = False
        update_wrapper(self, command.task)

    def __call__(self, config: DictConfig) -> None:
        self.started = True
        try:
            self.command.task(config)
            return
        except (GPPError, OmegaConfBaseException) as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            log.info("%s", told(error), exc_info=error)
            if not is_shown_elsewhere(error):
                self.command.tell(told(error))
        except Exception as error:  # the user's code, in the middle of a run
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            log.info("the job's end", exc_info=error)
            if not is_shown_elsewhere(error):
                sys.excepthook(type(error), with_user_lines(error), error.__traceback__)
            self.command.tell(place_of_traceback())
        self.failed = True


def own_configs(arguments: Sequence[str]) -> list[str]:
    """The options that add the project's folder `configs`, where there is one and the command names no other."""
    named = any(argument.split("=")[0] in ("--config-dir", "-cd") for argument in arguments)
    return [] if named or not Path("configs").is_dir() else ["--config-dir", "configs"]


def in_order(arguments: Sequence[str]) -> list[str]:
    """The arguments with overrides behind all options, where argparse finds them together."""
    overrides = [each for each in arguments if not each.startswith("-") and ("=" in each or each.startswith("~"))]
    return [*(each for each in arguments if each not in overrides), *overrides]


def quiet_overrides(environment: Mapping[str, str], arguments: Sequence[str] = ()) -> list[str]:
    """Overrides for all but the first process of torchrun or srun: only the first keeps a run folder.

    A run folder that the user names is that of all: there they find the checkpoint that the run goes on from.
    """
    rank = environment.get("RANK", environment.get("SLURM_PROCID", "0"))
    if rank == "0":
        return []
    if any(argument.startswith("hydra.run.dir=") for argument in arguments):
        return [f"hydra.job.name=rank{rank}", "hydra.output_subdir=null"]
    folder = tempfile.mkdtemp(prefix="gpp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.output_subdir=null"]
