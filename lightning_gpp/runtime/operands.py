"""The operands of an operator: its tensors, and those that it changes in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from lightning_gpp._compat.torch import schema_arguments


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, also inside of lists and tuples; pytree takes much longer."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@cache
def changes(func: Any) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operator changes in place."""
    arguments = enumerate(schema_arguments(func))
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call changes in place."""
    return list(tensors_in(kwargs.get(name, args[place : place + 1]) for place, name in changes(func)))
