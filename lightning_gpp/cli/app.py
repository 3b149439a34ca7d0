"""Shared parts of the commands: config folders, Hydra, and the display of errors."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_gpp.cli import schema
from lightning_gpp.cli.check import arguments
from lightning_gpp.cli.help import ASKED, VERSION, help_text
from lightning_gpp.cli.stopping import EXIT_CODE, interruptible
from lightning_gpp.cli.target import imported
from lightning_gpp.errors import ConfigError, GPPError, did_you_mean, is_shown_elsewhere

log = logging.getLogger(__name__)


def config_folder() -> Path:
    """The folder of the shipped configs: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of this package.

    Args:
        name: the name that the user types.
        config: the configuration file that it composes.
        about: its description, in a sentence or two.
        examples: command lines with their purposes.
        task: called with the composed configuration; a sweeper gets its result.
    """

    name: str
    config: str
    about: str
    examples: Sequence[tuple[str, str]]
    task: Callable[[DictConfig], float | None]

    @property
    def help(self) -> str:
        return help_text(
            name=self.name, about=self.about, examples=self.examples, folder=config_folder(), config=self.config
        )


def run(command: Command) -> None:
    """Compose the configuration from the command line and hand it to the task; user errors end without a traceback."""
    if not sys.argv[1:] or set(ASKED) & set(sys.argv[1:]):
        print(command.help)
        return
    if "--version" in sys.argv[1:]:
        print(VERSION)
        return
    _prepare()
    job = _HydraTask(command)
    try:
        with interruptible():
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=command.config)(job)()
    except KeyboardInterrupt as interrupt:
        print(f"{command.name}: interrupted{' ' * bool(str(interrupt))}{interrupt}.", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except (GPPError, HydraException, OmegaConfBaseException, OSError, UnicodeError, YAMLError, ValueError) as error:
        if not _is_told(error, job.started):
            raise
        print(f"{command.name}: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    if job.failed:
        sys.exit(1)


def _prepare() -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes Hydra raise instead of printing a shortened traceback
    # a warning of Lightning 2.6 on newer torch that users cannot change, from every process
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    sys.argv[1:] = in_order(sys.argv[1:])
    sys.argv.extend(quiet_overrides(os.environ, sys.argv))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules of the user's project; an installed command has only its own folder
    schema.register()


def _is_told(error: Exception, started: bool) -> bool:
    """True for a user's mistake, for which the message is enough; other errors need a traceback."""
    if isinstance(error, OSError | ValueError | YAMLError):
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
            told = explain(error)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                _end_sweep(f"{self.command.name}: {told}")
                raise
            if not is_shown_elsewhere(error):
                print(f"{self.command.name}: {told}", file=sys.stderr)
            log.info("%s", told)
            self.failed = True
            return None


def _end_sweep(message: str) -> None:
    """End a sweep that runs in this process: Hydra's launcher would go on with the other jobs first."""
    launcher = str(HydraConfig.get().launcher._target_)
    sweeper = str(HydraConfig.get().sweeper._target_)
    if launcher.endswith(".BasicLauncher") and sweeper.endswith(".BasicSweeper"):
        print(message, file=sys.stderr)
        sys.exit(1)


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


def explain(error: BaseException) -> str:
    """The messages of an error and its causes, and for a key that does not exist, those that do."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not KEY=VALUE, for example trainer.devices=4. --help lists groups and keys."
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra has one that is both
        return f"{error.filename}: {error.strerror}. hydra.run.dir=FOLDER chooses another run folder."
    if isinstance(error, GPPError):
        return str(error)
    if isinstance(error, YAMLError):
        return f"A configuration file is not YAML: {' '.join(str(error).split())}."
    if type(error) is ValueError:  # from Hydra, about arguments
        reason = str(error).rstrip(".!")
        return f"{reason}. Arguments have the form KEY=VALUE, for example trainer.devices=4; --help lists them."
    lines = (line for cause in _causes(error) for line in (*_message(cause), _keys(cause)))
    return "\n".join(dict.fromkeys(filter(None, lines)))


def _message(error: BaseException) -> list[str]:
    """The lines of a message that help. Of Hydra's, a key that does not exist cannot be appended either."""
    lines = str(error).split("\n    full_key")[0].split("\nConfig search path")[0].splitlines()
    return [line for line in lines if not line.startswith("To append to your config")]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _keys(error: BaseException) -> str:
    parent: Any = getattr(error, "parent_node", None)
    if not isinstance(parent, DictConfig) or getattr(error, "key", None) in parent:
        return ""
    group = str(getattr(error, "full_key", None) or "").rpartition(".")[0]
    key, known = str(getattr(error, "key", "")), {str(name) for name in parent if not str(name).startswith("_")}
    more = _arguments_of(parent) - known
    if key in more:
        return f"It is an argument of {parent._target_} that its file leaves out: write +{group}.{key}=VALUE."
    return f"Keys of {group or 'the configuration'}:{did_you_mean(key, known | more)}"


def _arguments_of(node: DictConfig) -> set[str]:
    """The arguments of the class or function that a node describes, as far as it can be imported."""
    if not isinstance(node.get("_target_"), str) or str(node._target_).startswith("lightning_gpp."):
        return set()
    with suppress(ConfigError):
        return arguments(imported(node._target_, "_target_")) - {"**", "args", "kwargs"}
    return set()
