"""References from one key of a configuration to another, or to a resolver, that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from lightning_gpp._compat.omegaconf import key_of, raw_value


def unresolved(node: DictConfig, error: InterpolationResolutionError) -> str:
    """The message for a reference that leads nowhere, with the keys at or below the node that have one."""
    reason = str(error).splitlines()[0].rstrip(".")
    found = [f"{path}={raw_value(owner, key)}" for path, owner, key in _references(node) if _leads_nowhere(owner, key)]
    return f"{', '.join(found)}: {reason}. Give it a value." if found else f"{reason}. Give it a value."


def _references(node: DictConfig) -> Iterator[tuple[str, DictConfig, Any]]:
    """Paths of the keys with references, each with its node and its name there."""
    keys: Any = node  # which may be numbers
    for key in keys:
        if OmegaConf.is_interpolation(node, key):
            yield (f"{key_of(node)}.{key}" if key_of(node) else str(key)), node, key
        elif not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from _references(node[key])


def _leads_nowhere(node: DictConfig, key: Any) -> bool:
    try:
        node[key]
    except InterpolationResolutionError:
        return True
    return False
