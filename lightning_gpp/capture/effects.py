"""Undoing what the step does to attributes of its modules, because the source runs the beginning of the step again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_NOT_ITS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, hooks and the like."""


@contextmanager
def without_effects(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore attributes that were set, and lists that grew, when the context ends.

    Changes inside other objects stay.
    """
    before = [(module, dict(vars(module)), _lists(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, lists in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for items, length in lists:
                del items[length:]


def _lists(module: nn.Module) -> list[tuple[list[Any], int]]:
    own = (value for name, value in vars(module).items() if name not in _NOT_ITS_OWN)
    return [(value, len(value)) for value in own if type(value) is list]
