"""Reads the stages spec of a user, in any of its forms, as one list of entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from annotated_types import Ge, MinLen

from lightning_gpp.errors import ConfigError
from lightning_gpp.validation import validated

StagesSpec = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One of: module path -> stage number; stage name -> its keys (or its list of modules); a list of stages' keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stage as the user wrote it; None for keys that are left out."""

    modules: Annotated[tuple[str, ...], MinLen(1)]
    name: str | None = None
    devices: tuple[Annotated[int, Ge(0)], ...] | None = None
    micro_batch_size: Annotated[int, Ge(1)] | None = None
    recompute: bool | tuple[str, ...] = False
    offload: bool = False
    round_robin: bool = False
    slack: Annotated[int, Ge(0)] = 0
    tensor_parallel_size: Annotated[int, Ge(1)] | None = None


KEYS: Final = tuple(field.name for field in fields(Entry))


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
    if isinstance(keys, Mapping):
        keys = {key: [value] if key == "modules" and isinstance(value, str) else value for key, value in keys.items()}
    return validated(Entry, keys, error=ConfigError, key=where, remedy=_REMEDY)


_REMEDY: Final = f"A stage has `modules` (paths of modules), and may have {', '.join(KEYS[1:])}."
