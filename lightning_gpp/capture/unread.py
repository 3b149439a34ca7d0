"""Iterators and open files that modules keep: a copy that read them would take items from training."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import nn

from lightning_gpp.errors import CaptureError

_DROPPED: Final = ("write", "writelines", "flush")
"""Methods of files that do nothing in a copy, whose numbers are invented."""
_DEEPEST: Final = 4
_MOST_ITEMS: Final = 1000
"""Items of the largest containers that are looked into."""


class Unread:
    """Stands for an iterator or file in a copy of a module, and refuses to be read. `name`: that of the attribute."""

    def __init__(self, name: str) -> None:
        self.named_here = name

    def __iter__(self) -> Any:
        return self.__getattr__("__iter__")

    def __next__(self) -> Any:
        return self.__getattr__("__next__")

    def __getattr__(self, method: str) -> Any:
        if method == "named_here":  # while it is copied
            raise AttributeError(method)
        if method in _DROPPED:
            return _dropped
        raise CaptureError(
            f"The step reads {self.named_here!r}, an iterator or open file that the module keeps. Set-up runs the step "
            "on a copy of the module, so training would start with later items. Let the data have its samples "
            "(Lightning's CombinedLoader), or read them in on_train_batch_start and keep what was read in an attribute."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Unread:
        return self


def unread_in(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Stand-ins for the iterators and open files in attributes of modules, by the id of what they replace."""
    return {id(value): Unread(name) for module in modules for name, value in _readers(vars(module), "")}


def _readers(container: Any, above: str) -> Iterator[tuple[str, Any]]:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        name = f"{above}.{key}" if above else str(key)
        if _is_read(value):
            yield name, value
        elif type(value) in (dict, list) and len(value) <= _MOST_ITEMS and name.count(".") < _DEEPEST:
            yield from _readers(value, name)


def _is_read(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        return not value.closed
    return isinstance(value, Iterator) and not isinstance(value, nn.Module | Unread)


def _dropped(*_: Any) -> None:
    """Replaces methods of files that write."""
