"""Attributes in parts of a module, in objects and outside of it, that a run which does not count leaves as they are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from torch import nn

from lightning_gpp.capture.attributes import (
    METHODS,
    MOST_ITEMS,
    Attribute,
    AttributePlace,
    as_it_is,
    is_plain,
    same_value,
)
from lightning_gpp.capture.left_tensors import unchanged
from lightning_gpp.capture.outside import outside
from lightning_gpp.capture.shared_objects import DICTS

CONTAINERS: Final = (*DICTS, Counter, list, set, deque)
_DEEPEST: Final = 3


def outside_of_steps(module: nn.Module) -> list[Attribute]:
    """The attributes outside of a module that its steps may change, each once."""
    found = [(key, AttributePlace(module, key)) for step in METHODS for key in outside(module, step)]
    return sorted({place.id: key for key, place in found}.values())


def outside_kept(module: nn.Module) -> AbstractContextManager[None]:
    """A context after which what steps change outside of a module is as before."""
    return places_kept(module, outside_of_steps(module))


@contextmanager
def places_kept(module: nn.Module, attributes: Collection[Attribute]) -> Iterator[None]:
    """Restore these attributes of parts, or outside of the module, and their containers, when the context ends."""
    places = [AttributePlace(module, key) for key in attributes]
    before = [(place, as_it_is(place.read()), place.exists) for place in places]
    containers = [inner for place, _, _ in before for inner in _containers_in(place.read())]
    try:
        with contents_kept(containers):
            yield
    finally:
        for place, kept, existed in before:
            if not existed:
                place.drop()
            elif is_plain(kept) and not same_value(place.read(), kept):
                place.write(kept)


@contextmanager
def contents_kept(containers: Sequence[Any]) -> Iterator[None]:
    """Restore small containers, and shorten long lists that grew."""
    lists = [(value, len(value)) for value in containers if isinstance(value, list)]
    try:
        with unchanged([value for value in containers if len(value) <= MOST_ITEMS]):
            yield
    finally:
        for items, length in lists:
            del items[length:]


def _containers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """A container, and those in it, if it is small."""
    if type(value) not in CONTAINERS:
        return
    yield value
    if len(value) <= MOST_ITEMS and depth < _DEEPEST:
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _containers_in(inner, depth + 1)
