"""Errors of Hydra, OmegaConf and YAML in words for people: what is wrong in the command line or a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_gpp.errors import ConfigError, GPPError, close_to
from lightning_gpp.explained import named_at_end
from lightning_gpp.option import options_of
from lightning_gpp.training.options import Options


def told(error: BaseException) -> str:
    """The messages of an error and its causes."""
    if isinstance(error, GPPError):
        return str(error)
    if isinstance(error, YAMLError):
        text = f"A configuration file is not YAML: {' '.join(str(error).split())}."
    elif (wrong := re.match(r"Could not override '([\w.]+)'", str(error))) and (meant := _meant(wrong[1])):
        text = f"{wrong[0]}: there is no such key. Did you mean {' or '.join(meant)}?"
    else:
        text = "\n".join(dict.fromkeys(line for cause in _causes(error) for line in _lines(cause)))
    return named_at_end(text, ConfigError.family)


def place_of_traceback() -> str:
    """A sentence that names the file of Hydra's log, to which the traceback was written."""
    hydra = HydraConfig.get()
    return f"The traceback is in {hydra.runtime.output_dir}/{hydra.job.name}.log."


def _lines(error: BaseException) -> list[str]:
    """The lines of a message that help."""
    message = str(error).split("\nConfig search path")[0]
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        message = f"{key}: {message.splitlines()[0]}" if key else message
        if re.search(r"Environment variable '(SLURM_|\w*WORLD_SIZE)", message):
            message += ": a launcher sets it (torchrun, or srun in a job with --ntasks-per-node). Start by that one."
    return [line for line in message.splitlines() if line.strip()]


def _meant(wrong: str) -> Sequence[str]:
    """The options of the strategy that a wrong key may stand for: of its name, or of a close one."""
    options = [option.name for option in options_of(Options)]
    group, _, name = wrong.rpartition(".")
    close = close_to(name, options) if group == "strategy" else []
    return [f"strategy.{each}" for each in ([name] if name in options else close)]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
