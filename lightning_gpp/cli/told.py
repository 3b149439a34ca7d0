"""Errors of Hydra, OmegaConf and YAML in words for people: what is wrong in the command line or a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from lightning_gpp.config_files import files, groups
from lightning_gpp.errors import ConfigError, GPPError, close_to
from lightning_gpp.explained import named_at_end


def told(error: BaseException) -> str:
    """The messages of an error and its causes, and for a key that does not exist, those that do."""
    return str(error) if isinstance(error, GPPError) else named_at_end(_told(error), ConfigError.family)


def _told(error: BaseException) -> str:
    if isinstance(error, YAMLError):
        return f"A configuration file is not YAML: {' '.join(str(error).split())}."
    causes = list(_causes(error))
    missing = next(filter(None, map(_missing_key, causes)), "")
    return missing or "\n".join(dict.fromkeys(line for cause in causes for line in _lines(cause)))


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
    return [line for line in message.splitlines() if line.strip()]


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
    full = str(getattr(error, "full_key", None) or key)
    if full in groups():
        return f"The group {full!r} has no keys, as none of its files is chosen: {full}={'|'.join(files(full))}."
    group = full.rpartition(".")[0]
    names = {str(name) for name in parent if not str(name).startswith("_")} | (set() if group else set(groups()))
    close = close_to(key, names)
    guess = f" Did you mean {f'{group}.' * bool(group)}{close[0]}?" if close else ""
    adding = f" If {parent._target_} takes it, write +{full}=VALUE." if "_target_" in parent else ""
    return f"There is no key {full!r}.{guess} There are: {', '.join(sorted(names))}.{adding}"
