"""Changes that forwards make in dictionaries and lists of their arguments are a part of the answers to their calls.

A module that gets the batch as a dictionary often writes its results there, for the step or for the next module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gpp._compat.torch import pytree

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and other arguments of a call."""


@dataclass(frozen=True, slots=True)
class GivenPlace:
    """Stands for a dictionary or list of a call's arguments; the keys lead to it from these."""

    keys: tuple[Any, ...]

    def find(self, arguments: CallArguments) -> Any:
        """The dictionary or list in the arguments of another call."""
        found: Any = arguments
        for key in self.keys:
            found = found[key]
        return found


@dataclass(frozen=True, slots=True)
class Filling:
    """The change of one dictionary or list. `set`: keys or indices with new values; `length`: that of a list."""

    given: GivenPlace
    set: tuple[Any, ...]
    removed: tuple[Any, ...] = ()
    length: int | None = None

    def read(self, arguments: CallArguments) -> list[Any]:
        """The new values."""
        found = self.given.find(arguments)
        return [found[key] for key in self.set]

    def write(self, arguments: CallArguments, values: Sequence[Any]) -> None:
        """Do the same with other values."""
        found = self.given.find(arguments)
        for key in self.removed:
            found.pop(key, None)
        if self.length is not None:
            found[:] = [*found, *[None] * self.length][: self.length]
        for key, value in zip(self.set, values, strict=True):
            found[key] = value


class Arrived:
    """The arguments of a call as they arrived."""

    def __init__(self, arguments: CallArguments) -> None:
        self._leaves = pytree.tree_leaves(arguments)
        found = dict(containers(arguments))
        self._before = [(given, value, value.copy()) for given, value in found.items()]

    @property
    def leaves(self) -> list[Any]:
        """Their leaves, whatever has happened to dictionaries and lists since."""
        return self._leaves

    def fillings(self) -> tuple[Filling, ...]:
        """Compare dictionaries and lists with what they were."""
        changes = (_change(given, now, before) for given, now, before in self._before)
        return tuple(change for change in changes if change is not None)


def containers(arguments: CallArguments) -> Iterator[tuple[GivenPlace, Any]]:
    """The dictionaries and lists in arguments, each once."""
    seen = set[int]()

    def walk(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[GivenPlace, Any]]:
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            yield GivenPlace(keys), value
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list | tuple) and id(inner) not in seen:
                yield from walk(inner, (*keys, key))

    for number, given in enumerate(arguments):
        for key, inner in given.items() if isinstance(given, Mapping) else enumerate(given):
            if isinstance(inner, dict | list | tuple):
                yield from walk(inner, (number, key))


def _change(given: GivenPlace, now: Any, before: Any) -> Filling | None:
    if isinstance(now, dict):
        new = tuple(key for key, value in now.items() if key not in before or before[key] is not value)
        removed = tuple(key for key in before if key not in now)
        return Filling(given, new, removed) if new or removed else None
    new = tuple(index for index, value in enumerate(now) if index >= len(before) or before[index] is not value)
    return Filling(given, new, length=len(now)) if new or len(now) != len(before) else None


def answer(output: Any, arguments: CallArguments, fillings: Sequence[Filling]) -> Any:
    """The result of a call, and with fillings also the values that it has put into its arguments, as one tree.

    Dictionaries and lists of the arguments are not repeated in it.
    """
    if not fillings:
        return output
    places = {id(value): given for given, value in containers(arguments)}
    told = pytree.tree_map(lambda leaf: places.get(id(leaf), leaf), output, is_leaf=lambda each: id(each) in places)
    return told, [filling.read(arguments) for filling in fillings]


def delivered(tree: Any, arguments: CallArguments, fillings: Sequence[Filling]) -> Any:
    """The result in a tree that `answer` made of a like call; puts the other values into these arguments."""
    if not fillings:
        return tree
    output, contents = tree
    for filling, values in zip(fillings, contents, strict=True):
        filling.write(arguments, values)
    return pytree.tree_map(lambda leaf: leaf.find(arguments) if isinstance(leaf, GivenPlace) else leaf, output)


def answering(function: Any, fillings: Sequence[Filling], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and return its `answer`."""
    return answer(function(*args, **kwargs), (args, kwargs), fillings)
