"""Tells people about errors of Hydra, OmegaConf and YAML: what is wrong in the command line or in which file."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError
from yaml import YAMLError

from lightning_gpp.cli.config_files import files, groups
from lightning_gpp.errors import GPPError, close_to


def told(error: BaseException) -> str:
    """The messages of an error and its causes, and for a key that does not exist, those that do."""
    if isinstance(error, OverrideParseException):
        return not_an_override(error.override)
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra has one that is both
        return f"{error.filename}: {error.strerror}. hydra.run.dir=FOLDER chooses another run folder."
    if isinstance(error, GPPError):
        return str(error)
    if isinstance(error, YAMLError):
        return f"A configuration file is not YAML: {' '.join(str(error).split())}."
    if isinstance(error, UnicodeDecodeError):
        return f"{_file_read(error)} is not text in UTF-8, see byte {error.start}. Save it in this encoding."
    if isinstance(error, RecursionError):  # from Hydra, which follows lists of defaults
        return "A configuration file is in its own list of defaults, directly or by way of others. Remove it there."
    if type(error) is ValueError:  # from Hydra, about arguments
        reason = str(error).rstrip(".!")
        return f"{reason}. Arguments have the form KEY=VALUE, for example trainer.devices=4; --help lists them."
    if isinstance(error, InterpolationResolutionError):
        key = f"{error.full_key}: " if error.full_key else ""
        return f"{key}{str(error).splitlines()[0].rstrip('.')}. Give it a value."
    causes = list(_causes(error))
    missing = [message for cause in causes if (message := _missing_key(cause))]
    return "\n".join(dict.fromkeys(missing[:1] or [line for cause in causes for line in _lines(cause)]))


def not_an_override(argument: str | None, words: Sequence[str] = ()) -> str:
    """The message for an argument without a key or a value; `words` are those that a command knows."""
    close = close_to(str(argument), words)
    guess = f" Did you mean {close[0]}?" if close else ""
    return f"{argument!r} is not KEY=VALUE, for example trainer.devices=4.{guess} --help lists groups and keys."


def _file_read(error: BaseException) -> str:
    """The path of the file that was read when the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = (value for frame in frames for value in frame.f_locals.values())
    return next((str(value.name) for value in values if isinstance(value, io.TextIOWrapper)), "A configuration file")


def _lines(error: BaseException) -> list[str]:
    """The lines of a message that help, without the file that only has types."""
    lines = str(error).split("\n    full_key")[0].split("\nConfig search path")[0].splitlines()
    return [line for line in lines if line.strip() not in ("", "gpp_schema")]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _missing_key(error: BaseException) -> str:
    """The message for a key that does not exist; empty if the error is another one."""
    parent: Any = getattr(error, "parent_node", None)
    key = str(getattr(error, "key", ""))
    if not isinstance(error, ConfigKeyError | ConfigAttributeError) or not isinstance(parent, DictConfig):
        return ""
    if key in parent:
        return ""
    full = str(getattr(error, "full_key", None) or key)
    if full in groups():
        return f"The group {full!r} has no keys, as none of its files is chosen: {full}={'|'.join(files(full))}."
    group = full.rpartition(".")[0]
    names = {str(name) for name in parent if not str(name).startswith("_")} | (set() if group else set(groups()))
    close = [f"{group}.{name}" for name in close_to(key, names)] if group else _meant(parent, key, names)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    adding = f" If {parent._target_} takes it, write +{full}=VALUE." if "_target_" in parent else ""
    return f"There is no key {full!r}.{guess} There are: {', '.join(sorted(names))}.{adding}"


def _meant(root: DictConfig, name: str, names: set[str]) -> list[str]:
    """The keys that a name without a group may stand for: of that name inside of a group, or close to it."""
    inside = [key for key in _keys_of(OmegaConf.to_container(root)) if key.endswith(f".{name}")]
    return [*inside, *close_to(name, names)][:3]


def _keys_of(content: Any, path: str = "") -> Iterator[str]:
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{path}{key}"
        yield from _keys_of(value, f"{path}{key}.")
