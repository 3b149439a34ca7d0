"""Reads the stages spec of a user, in any of its forms, as one list of entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpp.errors import ConfigError

StagesSpec = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One of: module path -> stage number; stage name -> its keys (or its list of modules); a list of stages' keys."""

KEYS: Final = ("name", "modules", "devices", "micro_batch_size", "recompute", "round_robin", "slack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stage as the user wrote it; None for keys that are left out."""

    modules: tuple[str, ...]
    name: str | None = None
    devices: tuple[int, ...] | None = None
    micro_batch_size: int | None = None
    recompute: bool = False
    round_robin: bool = False
    slack: int = 0


def read(spec: StagesSpec) -> list[Entry]:
    """The stages that a user wrote.

    Raises:
        ConfigError: the spec has none of the forms.
    """
    if not spec:
        raise ConfigError("strategy.stages is empty; give module paths and stage numbers, or leave it out.")
    if not isinstance(spec, Mapping):
        return [_entry(f"strategy.stages[{index}]", keys) for index, keys in enumerate(spec)]
    for path, number in spec.items():
        if isinstance(number, str) and number.isdigit():
            raise ConfigError(f"strategy.stages.{path} is {number!r}, a string; stages are whole numbers: {number}.")
    numbers = [number for number in spec.values() if isinstance(number, int)]
    if len(numbers) == len(spec):
        return _numbered(spec)
    if numbers:
        raise ConfigError(
            "strategy.stages mixes module paths with numbers and stage names with modules: "
            f"{dict(spec)}. Write all entries in one form."
        )
    return [_entry(f"strategy.stages.{name}", _named(name, keys)) for name, keys in spec.items()]


def _numbered(spec: Mapping[str, int]) -> list[Entry]:
    count = 1 + max(spec.values())
    modules = [tuple(path for path, number in spec.items() if number == stage) for stage in range(count)]
    if not all(modules) or min(spec.values()) < 0:
        raise ConfigError(
            f"strategy.stages must number the stages 0..n-1 without gaps, got {sorted(set(spec.values()))}."
        )
    return [Entry(modules=paths) for paths in modules]


def _named(name: str, keys: Any) -> Any:
    if isinstance(keys, Mapping):
        return {"name": name, **keys}
    return {"name": name, "modules": keys}


def _entry(where: str, keys: Any) -> Entry:
    if not isinstance(keys, Mapping) or not keys.get("modules") or set(keys) - set(KEYS):
        raise ConfigError(f"{where}: a stage needs `modules`, and may have {', '.join(KEYS)}, inputs; got {keys!r}.")
    size = keys.get("micro_batch_size")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"{where}.micro_batch_size is {size!r}; it must be a whole number >= 1.")
    slack = keys.get("slack", 0)
    if not isinstance(slack, int) or isinstance(slack, bool) or slack < 0:
        raise ConfigError(f"{where}.slack is {slack!r}; it must be a whole number >= 0.")
    flags = {key: keys.get(key, False) for key in ("recompute", "round_robin")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}.{key} is {value!r}; it must be true or false.")
    return Entry(
        name=keys.get("name"),
        modules=tuple(_list(f"{where}.modules", keys["modules"], str)),
        devices=tuple(_list(f"{where}.devices", keys["devices"], int)) if keys.get("devices") is not None else None,
        micro_batch_size=size,
        slack=slack,
        **flags,
    )


def _list(where: str, values: Any, kind: type) -> list[Any]:
    found = [values] if isinstance(values, str) else values
    if not isinstance(found, Sequence) or not all(isinstance(value, kind) for value in found):
        raise ConfigError(f"{where} must be a list of {kind.__name__}, got {values!r}.")
    return list(found)
