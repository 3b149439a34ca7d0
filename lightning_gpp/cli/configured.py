"""Builds the objects that a configuration names by `_target_`; errors name the key, its values and the real cause."""

from __future__ import annotations

import logging
import traceback
from typing import Any, Final

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_gpp._compat.omegaconf import key_of
from lightning_gpp.cli.log_file import place_of_traceback
from lightning_gpp.errors import ConfigError, GPPError

_EXTRAS: Final = {"sklearn": "examples", "transformers": "hf"}
"""Packages that the shipped examples need, with the extra of this package that installs them."""


def built(node: DictConfig, kind: type | None = None, **arguments: Any) -> Any:
    """The object that a node of the configuration describes.

    Raises:
        GPPError: there is no class to build, it refuses its arguments or lacks a package, its constructor failed in
            another way, or the object is not of this kind.
    """
    if "_target_" not in node:
        raise ConfigError(
            f"{key_of(node)} has no _target_, only {', '.join(map(str, node))}: choose a file of its group "
            "that has one, or remove these keys."
        )
    try:
        found = instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, GPPError):
            raise error.__cause__ from None
        raise _mistake(node, error.__cause__ or error) from error
    if kind is not None and not isinstance(found, kind):
        raise ConfigError(f"{key_of(node)}._target_={node._target_} is no {kind.__name__}.")
    return found


def refusal(settings: str, error: BaseException, remedy: str = "") -> ConfigError:
    """The error for settings that Lightning refuses."""
    return ConfigError(f"Lightning refuses {settings}: {_sentence(error)}{remedy}")


def _mistake(node: DictConfig, error: BaseException) -> ConfigError:
    """The error of a constructor, or of an import, as a mistake in the node."""
    if isinstance(error, ImportError):
        return ConfigError(
            f"{key_of(node)}._target_={node._target_} cannot be imported: {_sentence(error)}.{_remedy(error)}"
        )
    values = ", ".join(f"{name}={node[name]}" for name in map(str, node) if not name.startswith("_"))
    return ConfigError(
        f"{key_of(node) or 'configuration'} ({node._target_}) does not work with its settings"
        f"{f' ({values})' if values else ''}: {type(error).__name__}: {_sentence(error)}{_place(error)}."
        f"{_logged(error)}"
    )


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _place(error: BaseException) -> str:
    """The innermost line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _remedy(error: BaseException) -> str:
    """A sentence for a missing package that an extra of this one installs."""
    extra = next((extra for name, extra in _EXTRAS.items() if f"No module named '{name}" in str(error)), None)
    return f' Install it: pip install "lightning-gpp[{extra}]", or pip install ".[{extra}]" in a clone.' * bool(extra)


def _logged(error: BaseException) -> str:
    """Write the traceback to the run folder's log, and say so."""
    if not HydraConfig.initialized():
        return ""
    logging.getLogger(__name__).warning("the error's traceback", exc_info=error)
    return f" {place_of_traceback()}"
