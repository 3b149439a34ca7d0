"""Checks of a composed configuration, before anything is built from it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_gpp.cli.settings import check_settings
from lightning_gpp.cli.target import imported
from lightning_gpp.errors import ConfigError

EXTERNAL_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of launchers other than Lightning."""


def check(config: DictConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        ConfigError: a `_target_` does not exist or does not take one of the keys beside it, or a key has a value of
            the wrong type.
    """
    check_settings(config)
    check_nodes(config.trainer)
    for path, node in targets(config):
        check_target(path, node)


def check_nodes(trainer: DictConfig) -> None:
    """Refuse a number of machines that is none.

    Raises:
        ConfigError: `trainer.num_nodes` is not a whole number, or below 1.
    """
    if OmegaConf.is_interpolation(trainer, "num_nodes"):  # from a launcher, which may not be here
        return
    number = trainer.get("num_nodes", 1)
    if type(number) is not int or number < 1:
        raise ConfigError(f"trainer.num_nodes={number} must be a whole number of 1 or more.")


def targets(config: DictConfig, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """All nodes with a `_target_`, with their keys."""
    if OmegaConf.is_missing(config, "_target_") or "_target_" in config:
        yield path, config
    keys: Any = config  # which may be numbers
    for key in keys:
        if OmegaConf.is_interpolation(config, key) or OmegaConf.is_missing(config, key):
            continue
        for name, item in _items(str(key), config[key]):
            yield from targets(item, f"{path}.{name}" if path else name)


def _items(key: str, value: Any) -> Iterable[tuple[str, DictConfig]]:
    if isinstance(value, DictConfig):
        return [(key, value)]
    if isinstance(value, ListConfig):
        return [(f"{key}[{i}]", item) for i, item in enumerate(value) if isinstance(item, DictConfig)]
    return []


def check_target(path: str, node: DictConfig) -> None:
    """Refuse a target that cannot be imported, and keys that it has no argument for."""
    allowed = arguments(imported(str(node._target_), f"{path}._target_"))
    given = [
        str(key) for key in node if str(key) not in ("_target_", "_convert_", "_recursive_", "_partial_", "_args_")
    ]
    unknown = [key for key in given if key not in allowed]
    if unknown and "**" not in allowed:
        raise ConfigError(
            f"{path}.{unknown[0]}: {node._target_} has no argument of that name. Keys of {path}: "
            f"{', '.join(sorted(allowed)) or 'none'}. Take the key out (on the command line: ~{path}.{unknown[0]})."
        )


def arguments(target: Any) -> set[str]:
    """Names of the arguments; "**" if any name is accepted."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {"**"}
    return {"**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters}


def has_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher other than Lightning has started this process and those beside it."""
    return any(name in environment for name in EXTERNAL_LAUNCHERS)
