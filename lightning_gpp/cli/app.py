"""Shared parts of the commands: config folders, Hydra, and the display of errors."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Final

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_gpp.cli import schema
from lightning_gpp.cli.config_files import config_folder
from lightning_gpp.cli.help import ASKED, VERSION, help_text
from lightning_gpp.cli.log_file import place_of_traceback
from lightning_gpp.cli.stopping import EXIT_CODE, interruptible, pipeable
from lightning_gpp.cli.told import not_an_override, told
from lightning_gpp.errors import GPPError, is_shown_elsewhere

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of this package.

    Args:
        name: the name that the user types.
        config: the configuration file that it composes.
        about: its description, in a sentence or two.
        examples: command lines with their purposes.
        task: called with the composed configuration; a sweeper gets its result.
        words: arguments without a value that the command knows.
    """

    name: str
    config: str
    about: str
    examples: Sequence[tuple[str, str]]
    task: Callable[[DictConfig], float | None]
    words: Sequence[str] = ()

    @property
    def help(self) -> str:
        return help_text(
            name=self.name, about=self.about, examples=self.examples, folder=config_folder(), config=self.config
        )


@pipeable()
def run(command: Command) -> None:
    """Compose the configuration from the command line and hand it to the task; user errors end without a traceback."""
    if not sys.argv[1:] or set(ASKED) & set(sys.argv[1:]):
        print(command.help)
        return
    if "--version" in sys.argv[1:]:
        print(VERSION)
        return
    if (stray := stray_word(sys.argv[1:])) is not None:
        print(f"{command.name}: {not_an_override(stray, command.words)}", file=sys.stderr)
        sys.exit(1)
    _prepare()
    job = _HydraTask(command)
    try:
        with interruptible():
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=command.config)(job)()
    except KeyboardInterrupt as interrupt:
        print(f"{command.name}: interrupted{' ' * bool(str(interrupt))}{interrupt}.", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except _TOLD as error:
        if not _is_told(error, job.started):
            raise
        print(f"{command.name}: {told(error)}", file=sys.stderr)
        sys.exit(1)
    if job.failed:
        sys.exit(1)


_TOLD: Final = (
    *(GPPError, HydraException, OmegaConfBaseException),
    *(OSError, UnicodeError, YAMLError, ValueError, RecursionError),
)


def _prepare() -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes Hydra raise instead of printing a shortened traceback
    # a warning of Lightning 2.6 on newer torch that users cannot change, from every process
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    sys.argv[1:] = in_order(sys.argv[1:])
    sys.argv.extend(quiet_overrides(os.environ, sys.argv))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules of the user's project; an installed command has only its own folder
    schema.register()


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    """False for Lightning's tips to install its vendor's packages."""
    return not record.getMessage().startswith("💡 Tip:")


def _is_told(error: Exception, started: bool) -> bool:
    """True for a user's mistake, for which the message is enough; other errors need a traceback."""
    if isinstance(error, OSError | ValueError | YAMLError | RecursionError):
        return not started  # before: arguments, a run folder or a configuration file; after: the user's code
    return not (started and isinstance(error, InstantiationException))  # from a constructor of the user's


class _HydraTask:
    """The task as Hydra calls it. It shows user errors itself: Hydra would print all overrides of the job first.

    In a sweep one ends the sweep, unless a sweeper or launcher other than Hydra's own decides.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.started = False
        self.failed = False
        update_wrapper(self, command.task)

    def __call__(self, config: DictConfig) -> float | None:
        self.started = True
        try:
            return self.command.task(config)
        except (GPPError, OmegaConfBaseException) as error:
            message = told(error)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                _end_sweep(f"{self.command.name}: {message}")
                raise
            if not is_shown_elsewhere(error):
                print(f"{self.command.name}: {message}", file=sys.stderr)
            log.info("%s", message)
        except Exception as error:  # the user's code, in the middle of a run
            if HydraConfig.get().mode is RunMode.MULTIRUN or not is_shown_elsewhere(error):
                raise
            log.info("the job's end", exc_info=error)
            print(f"{self.command.name}: {place_of_traceback()}", file=sys.stderr)
        self.failed = True
        return None


def _end_sweep(message: str) -> None:
    """End a sweep that runs in this process: Hydra's launcher would go on with the other jobs first."""
    launcher = str(HydraConfig.get().launcher._target_)
    sweeper = str(HydraConfig.get().sweeper._target_)
    if launcher.endswith(".BasicLauncher") and sweeper.endswith(".BasicSweeper"):
        print(message, file=sys.stderr)
        sys.exit(1)


def stray_word(arguments: Sequence[str]) -> str | None:
    """The first argument that is neither an option, nor behind one that may take it, nor an override."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument[:1] not in ("-", "~") and "=" not in argument and not before.startswith("-"):
            return argument
    return None


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
