"""Explains errors of Hydra, OmegaConf and YAML to people: what is wrong in the command line or in which file."""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError
from yaml import YAMLError

from lightning_gpp.cli.check import arguments
from lightning_gpp.cli.target import imported
from lightning_gpp.errors import ConfigError, GPPError, close_to


def config_folder() -> Path:
    """The folder of the shipped configs: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def groups() -> list[str]:
    """The names of the groups of configuration files."""
    return sorted(path.name for path in config_folder().iterdir() if path.is_dir())


def files(group: str) -> list[str]:
    """The names of the shipped files of a group."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def explain(error: BaseException, given: Sequence[str] = ()) -> str:
    """The messages of an error and its causes, and for a key that does not exist, those that do.

    Args:
        error: the error.
        given: the arguments of the command.
    """
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
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return f"{error.full_key}: {_message(error)[0].rstrip('.')}. Give it a value."
    causes = list(_causes(error))
    missing = [told for cause in causes if (told := _missing_key(cause))]
    lines = missing[:1] or [*_mistyped_groups(given), *(line for cause in causes for line in _message(cause))]
    return "\n".join(dict.fromkeys(filter(None, lines)))


def check_read(config: DictConfig) -> None:
    """Refuse keys of the command line that were added with a plus, and that nothing reads.

    Raises:
        ConfigError: with the key that may be meant.
    """
    hydra = HydraConfig.get()
    text = f"{OmegaConf.to_container(config)}{OmegaConf.to_container(hydra)}"
    for override in hydra.overrides.task:
        added = re.match(r"\+(\w+)(?=[.=])", override)
        name = added[1] if added else ""
        if not name or name in {*groups(), *hydra.runtime.choices} or re.search(rf"\$\{{[^}}]*\b{name}\b", text):
            continue
        known = {str(key) for key in config} - {name}
        close = _meant(OmegaConf.masked_copy(config, sorted(known)), name, {*known, *groups()})
        guess = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            f"{override} adds a key that nothing reads: no class has an argument of that name, and no other value "
            f"refers to ${{{name}}}.{guess} There are: {', '.join(sorted({*known, *groups()}))}."
        )


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


def _message(error: BaseException) -> list[str]:
    """The lines of a message that help, without the file that only has types."""
    lines = str(error).split("\n    full_key")[0].split("\nConfig search path")[0].splitlines()
    return [line for line in lines if line.strip() != "gpp_schema"]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _keys() -> set[str]:
    """The keys of the commands that are not in a group."""
    configs = (OmegaConf.load(path) for path in config_folder().glob("*.yaml"))
    return {str(key) for config in configs if isinstance(config, DictConfig) for key in config}


def _mistyped_groups(given: Sequence[str]) -> Iterator[str]:
    """Messages for arguments that would be groups with one letter less or more."""
    for name in (argument.partition("=")[0] for argument in given if re.match(r"\w+=", argument)):
        close = close_to(name, groups())
        if name not in {*groups(), *_keys()} and close:
            yield f"There is no group {name!r}. Did you mean {close[0]}? There are: {', '.join(groups())}."


def _missing_key(error: BaseException) -> str:
    """The message for a key that does not exist; empty if the error is another one."""
    parent: Any = getattr(error, "parent_node", None)
    key = getattr(error, "key", None)
    if not isinstance(error, ConfigKeyError | ConfigAttributeError) or not isinstance(parent, DictConfig):
        return ""
    if key in parent:
        return ""
    full = str(getattr(error, "full_key", None) or key)
    if full in groups():
        return f"The group {full!r} has no keys, as none of its files is chosen: {full}={'|'.join(files(full))}."
    group, known = full.rpartition(".")[0], {str(name) for name in parent if not str(name).startswith("_")}
    more = _arguments_of(parent) - known
    if key in more:
        return (
            f"{full} is not in the configuration. It is an argument of {parent._target_} that its file leaves out: "
            f"write +{group}.{key}=VALUE."
        )
    names = known | more if group else {*known, *groups()}
    close = [f"{group}.{name}" for name in close_to(str(key), names)] if group else _meant(parent, str(key), names)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"There is no key {full!r}.{guess} There are: {', '.join(sorted(names))}."


def _meant(root: DictConfig, name: str, names: Iterable[str]) -> list[str]:
    """The keys that a name without a group may stand for: inside of a group, or close to it."""
    keys = list(_keys_of(OmegaConf.to_container(root)))
    last = {key.rpartition(".")[2] for key in keys}
    wanted = [name] if name in last else close_to(name, last)
    inside = [key for key in keys if key.rpartition(".")[2] in wanted]
    return inside if name in last else [*inside, *close_to(name, names)][:3]


def _keys_of(content: Any, path: str = "") -> Iterator[str]:
    for key, value in content.items() if isinstance(content, dict) else ():
        inner = f"{path}.{key}" if path else str(key)
        if not str(key).startswith("_") and not inner.startswith("hydra"):
            yield inner
            yield from _keys_of(value, inner)


def _arguments_of(node: DictConfig) -> set[str]:
    """The arguments of the class or function that a node describes, as far as it can be imported."""
    if not isinstance(node.get("_target_"), str) or str(node._target_).startswith("lightning_gpp."):
        return set()
    with suppress(ConfigError):
        return arguments(imported(node._target_, "_target_")) - {"**", "args", "kwargs"}
    return set()
