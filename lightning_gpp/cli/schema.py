"""Types of the strategy's configuration, with which Hydra refuses wrong keys and values."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore

from lightning_gpp.option import options_of
from lightning_gpp.training.options import Options

_PRIMITIVES = (bool, int, float, str)


def register() -> None:
    """Make the types known to Hydra as `strategy/gpp_schema`."""
    keys = [("_target_", str), ("_convert_", str)]
    keys += [(definition.name, key_type(definition.kind)) for definition in options_of(Options)]
    schema = make_dataclass("StrategySchema", [(name, kind, field()) for name, kind in keys])
    ConfigStore.instance().store(group="strategy", name="gpp_schema", node=schema)


def key_type(kind: Any) -> Any:
    """The type of a configuration's key for an option of this type, or Any if Hydra has none.

    Only types of YAML's values count, of which a key may have one: `Plan | str | Path | None` is an optional str.
    """
    members = set(_members(kind))
    found = [primitive for primitive in _PRIMITIVES if primitive in members]
    if len(found) != 1 or dict in members:
        return Any
    return found[0] | None if type(None) in members else found[0]


def _members(kind: Any) -> Iterator[Any]:
    """The types of a union's values; dict represents every container."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _members(argument)
    elif origin is Literal:
        yield from map(type, arguments)
    elif hasattr(kind, "__metadata__"):
        yield from _members(arguments[0])
    else:
        yield kind if origin is None else dict
