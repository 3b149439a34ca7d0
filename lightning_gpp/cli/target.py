"""Builds objects that a configuration names by `_target_`; errors name the real cause, such as a missing package."""

from __future__ import annotations

import importlib
import traceback
from typing import Any, Final

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from lightning_gpp._compat.omegaconf import key_of
from lightning_gpp.cli.blame import mistake
from lightning_gpp.cli.references import unresolved
from lightning_gpp.errors import ConfigError, GPPError, did_you_mean

_EXTRAS: Final = {"sklearn": "examples", "transformers": "hf"}
"""Packages that the shipped examples need, with the extra of this package that installs them."""


def imported(name: str, key: str) -> Any:
    """The object with a dotted name.

    Args:
        name: dotted path of modules, and attributes inside the last one.
        key: the configuration key that names it, for messages.

    Raises:
        ConfigError: a module is missing or fails when it is imported, or it has no such attribute.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}={name} is not a dotted name such as my_package.MyModule.")
    found, depth = None, 0
    while depth < len(parts) and (module := _module(".".join(parts[: depth + 1]), f"{key}={name}")) is not None:
        found, depth = module, depth + 1
    if found is None:
        raise ConfigError(
            f"{key}={name} cannot be imported: there is no module {parts[0]!r}. Modules are searched in the current "
            "folder, in PYTHONPATH and among the installed packages."
        )
    for index in range(depth, len(parts)):
        owner = ".".join(parts[:index])
        if not hasattr(found, parts[index]):
            names = did_you_mean(parts[index], _defined_in(found))
            raise ConfigError(f"{key}={name} cannot be imported: {owner} has no attribute {parts[index]!r}.{names}")
        found = getattr(found, parts[index])
    return found


def built(node: DictConfig, **arguments: Any) -> Any:
    """The object that a node of the configuration describes.

    Raises:
        GPPError: there is no class to build, it refuses its arguments or lacks a package, or its constructor failed in
            another way.
    """
    if "_target_" not in node:
        raise ConfigError(
            f"{key_of(node)} has no _target_, only {', '.join(map(str, node))}: choose a file of its group "
            "that has one, or remove these keys."
        )
    try:
        return instantiate(node, **arguments)
    except InterpolationResolutionError as error:
        raise ConfigError(unresolved(node, error)) from error
    except InstantiationException as error:
        if isinstance(error.__cause__, GPPError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, ImportError):
            raise ConfigError(f"{node._target_} cannot be built: {' '.join(str(error.__cause__).split())}") from error
        raise mistake(node, error.__cause__ or error) from error


def _defined_in(owner: Any) -> list[str]:
    """Public classes and functions of a module that are not imported there."""
    public = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    return [name for name, value in public.items() if getattr(value, "__module__", None) == owner.__name__]


def _module(name: str, setting: str) -> Any:
    """The module; None if there is none with this name.

    Raises:
        ConfigError: there is one, but it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name == error.name or name.startswith(f"{error.name}."):
            return None
        missing = f"{name} needs {error.name!r}, which is not installed"
        raise ConfigError(f"{setting} cannot be imported: {missing}. {_remedy(error.name)}") from error
    except Exception as error:
        raise ConfigError(f"{setting} cannot be imported: {_cause(error)} while {name} was imported.") from error


def _remedy(missing: str) -> str:
    package = missing.partition(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return "Install the package that has it."
    return f'Install it: pip install "lightning-gpp[{extra}]", or pip install ".[{extra}]" in a clone.'


def _cause(error: Exception) -> str:
    """The error with its line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
