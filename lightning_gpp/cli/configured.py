"""Builds the objects that a composed configuration names by `_target_`. Errors name the key and the real cause."""

from __future__ import annotations

import re
from typing import Any, Final, get_args, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig

from lightning_gpp._compat.omegaconf import key_of
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.failure.report import told as event_of


def built(node: DictConfig, kind: type | None = None, **arguments: Any) -> Any:
    """The object that a node of the configuration describes.

    Raises:
        GPPError: there is no class to build, it refuses its arguments or lacks a package, its constructor failed in
            another way, or the object is not of this kind.
    """
    if "_target_" not in node:
        raise ConfigError(
            f"{key_of(node)} has no _target_, only {', '.join(map(str, node))}. Choose a file of its group that has "
            "one."
        )
    _check_texts(node)
    try:
        found = instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, GPPError):
            raise error.__cause__ from None
        raise _mistake(node, error.__cause__ or error) from error
    if kind is not None and not isinstance(found, kind):
        raise ConfigError(f"{key_of(node)}._target_={node._target_} is no {kind.__name__}.")
    return found


_NUMBERS: Final = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def _check_texts(node: DictConfig) -> None:
    """Refuse texts for arguments that are numbers: most classes stumble over them in the middle of a run.

    Raises:
        ConfigError: names the key.
    """
    try:
        hints = get_type_hints(vars(get_class(node._target_))["__init__"])
    except Exception:  # no such class, or hints of names that are not there: `instantiate` says what matters
        return
    for name, hint in hints.items():
        kinds = get_args(hint) or (hint,)
        if name in node and isinstance(node[name], str) and set(kinds) <= set(_NUMBERS) and not _is_number(node[name]):
            allowed = ", or ".join(_NUMBERS[kind] for kind in kinds)
            raise ConfigError(f"{key_of(node)}.{name}={node[name]} is a text; it must be {allowed}.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def refusal(settings: str, error: BaseException) -> ConfigError:
    """The error for settings that Lightning refuses."""
    return ConfigError(f"Lightning refuses {settings}: {' '.join(str(error).split())}")


def _mistake(node: DictConfig, error: BaseException) -> ConfigError:
    """The error of a constructor, or of an import, as a mistake in the node."""
    values = {name: str(node[name]) for name in map(str, node) if not name.startswith("_")}
    event = " ".join(event_of(error).split()).rstrip(".!")
    words = re.findall(r"[\w.-]+", event)
    named = {name: value for name, value in values.items() if name in words or (len(value) > 1 and value in words)}
    settings = ", ".join(f"{name}={value}" for name, value in (named or values).items())
    what = f"{key_of(node) or 'configuration'} ({node._target_}) cannot be built"
    return ConfigError(f"{what}: {event}. Its settings are {settings or 'none'}.")
