"""Errors of Hydra, OmegaConf and YAML in words for people: what is wrong in the command line or a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_gpp.config_files import groups
from lightning_gpp.errors import ConfigError, GPPError, close_to, did_you_mean
from lightning_gpp.explained import named_at_end
from lightning_gpp.option import options_of
from lightning_gpp.training.options import Options


def told(error: BaseException) -> str:
    """The messages of an error and its causes."""
    if isinstance(error, GPPError):
        return str(error)
    text = _mistake(error) or "\n".join(dict.fromkeys(line for cause in _causes(error) for line in _lines(cause)))
    return named_at_end(text, ConfigError.family)


def _mistake(error: BaseException) -> str:
    """A sentence about a common mistake, with what to type instead; empty for others."""
    message = str(error)
    if isinstance(error, YAMLError):
        return f"A configuration file is not YAML: {' '.join(message.split())}."
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read. A setting is KEY=VALUE without spaces; braces, brackets and commas "
            "need quotes around it: 'strategy.stages={encoder:0,decoder:1}'."
        )
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: there is no such file.{did_you_mean(name, error.options)}"
    if wrong := re.match(r"Could not override '([\w.]+)'", message):
        return _no_key(wrong[1], getattr(error.__cause__, "parent_node", None) or ())
    if unchosen := re.match(r"\s*(?:You must specify|Key) '(\w+)'(?!.*full_key: \S*\.)", message, re.DOTALL):
        return _unchosen(unchosen[1])
    if absent := re.search(r"Interpolation key '([\w.]+)' not found", message):
        group = absent[1].partition(".")[0]
        return f"A setting refers to {absent[1]}, and {group} has no such key. Choose the {group} that belongs to it."
    if "Config group override must be a string" in message:
        empty = next((each for each in sys.argv[1:] if each.partition("=")[0] in groups() and "=null" in each), "")
        return f"{empty} names no file of the group: give one, {empty.partition('=')[0]}=..."
    return ""


def _no_key(wrong: str, siblings: Iterable[object]) -> str:
    """A sentence about a key that is missing beside its siblings, or that is an option of the strategy."""
    group, _, name = wrong.rpartition(".")
    options = [f"strategy.{option.name}" for option in options_of(Options)]
    close = [f"{group}.{each}".strip(".") for each in close_to(name, map(str, siblings))]
    if group and name in groups():
        return f"{wrong}: there is no such key. Did you mean {name}=...?"
    meant = [each for each in options if each.endswith(f".{name}")] or close
    guess = f" Did you mean {' or '.join(meant)}?" if meant else ""
    return f"{wrong}: there is no such key.{guess} What the configuration does not have yet takes a plus: +{wrong}=..."


def _unchosen(group: str) -> str:
    """A sentence about a group of files of which none is chosen, perhaps because of a misspelt group."""
    typed = [each.partition("=")[0] for each in sys.argv[1:] if "=" in each]
    close = {name: get_close_matches(name, groups(), cutoff=0.8) for name in typed if name not in groups()}
    misspelt = "".join(f" {name}: did you mean {meant[0]}?" for name, meant in close.items() if meant)
    if "experiment" in typed:
        return f"The experiment chooses no {group}. Begin its file with the line `# @package _global_`."
    return f"No {group} is chosen: give experiment=... or {group}=...{misspelt}"


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
            message += ": a launcher sets it: torchrun, or srun in a job with --ntasks-per-node (not --ntasks alone)."
    return [line for line in message.splitlines() if line.strip()]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
