"""Items of samples that are no tensors, such as names: modules may get lists of them with a batch, but not read them.

A forward that is cut runs as the calls that were recorded, in which the items of one mini-batch would be frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

_READS: Final = (
    *("__getitem__", "__iter__", "__reversed__", "__contains__", "__eq__", "__ne__", "__lt__", "__gt__", "__add__"),
    *("__mul__", "count", "copy", "index", "pop", "sort"),
)
"""Methods of lists and tuples that read items."""


def is_plain_sequence(value: Any) -> bool:
    """True for a list or tuple of texts and numbers."""
    return type(value) in (list, tuple) and all(isinstance(item, str | int | float) for item in value)


def are_plain(items: Any) -> bool:
    """True for a list or tuple of texts and numbers, or of lists and tuples of them."""
    return is_plain_sequence(items) or (type(items) in (list, tuple) and all(map(is_plain_sequence, items)))


def watched(items: Sequence[Any], on_read: Callable[[], None]) -> Any:
    """A copy of a list or tuple that calls `on_read` before an item is read, and in which pytree does not look."""
    kind: type = type(items)
    made = _WATCHING[kind](items)
    made.on_read = on_read
    return made


def is_watched(value: Any) -> bool:
    """True for what `watched` returns."""
    return isinstance(value, tuple(_WATCHING.values()))


def _watching(kind: type) -> Any:
    def reading(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.on_read()
            return plain(self, *args, **kwargs)

        return method

    def deep(self: Any, memo: Any) -> Any:
        self.on_read()
        return copy.deepcopy(kind(tuple.__iter__(self) if kind is tuple else list.__iter__(self)), memo)

    methods = {name: reading(name) for name in _READS if name in vars(kind)}
    return type(f"Watched{kind.__name__.title()}", (kind,), methods | {"__hash__": kind.__hash__, "__deepcopy__": deep})


_WATCHING: Final[dict[type, Any]] = {kind: _watching(kind) for kind in (list, tuple)}
