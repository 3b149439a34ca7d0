"""Undo what a run of the step did to the modules' own attributes: the source runs the step's beginning once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_NOT_ITS_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, hooks and the like."""


@contextmanager
def without_effects(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, attributes of these modules may be set, and lists among them may grow; afterwards both are as
    they were. What is changed inside other objects stays changed."""
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
