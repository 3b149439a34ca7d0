"""Changes that forwards make in the containers among their arguments are a part of the answers to their calls.

A module that gets the batch as a dictionary or object often writes its results there, for the step or the next module.
Containers are mappings and lists, and objects that pytree looks into, such as dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gpp._compat.torch import pytree
from lightning_gpp.user_code import own_attributes

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and other arguments of a call."""


@dataclass(frozen=True, slots=True)
class ContainerPlace:
    """Stands for a container among the arguments of a call; the keys lead to it from these."""

    keys: tuple[Any, ...]

    def find(self, arguments: CallArguments) -> Any:
        """The container at this place of another call's arguments."""
        found: Any = arguments
        for key in self.keys:
            found = _contents(found)[key]
        return found


@dataclass(frozen=True, slots=True)
class Filling:
    """The change of one container. `set`: its keys, indices or attributes with new values; `length`: that of a list."""

    place: ContainerPlace
    set: tuple[Any, ...]
    removed: tuple[Any, ...] = ()
    length: int | None = None

    def read(self, arguments: CallArguments) -> list[Any]:
        """The new values."""
        contents = _contents(self.place.find(arguments))
        return [contents[key] for key in self.set]

    def write(self, arguments: CallArguments, values: Sequence[Any]) -> None:
        """Do the same with other values."""
        contents = _contents(self.place.find(arguments))
        for key in self.removed:
            contents.pop(key, None)
        if self.length is not None:
            contents[:] = [*contents, *[None] * self.length][: self.length]
        for key, value in zip(self.set, values, strict=True):
            contents[key] = value


class Arrived:
    """The containers among the arguments of a call as they arrived."""

    def __init__(self, arguments: CallArguments) -> None:
        found = ((place, _contents(value)) for place, value in containers(arguments))
        self._before = [(place, now, list(now) if isinstance(now, list) else dict(now)) for place, now in found]

    def fillings(self) -> tuple[Filling, ...]:
        """Compare the containers with what they were."""
        changes = (_change(place, now, before) for place, now, before in self._before)
        return tuple(change for change in changes if change is not None)


def containers(arguments: CallArguments) -> Iterator[tuple[ContainerPlace, Any]]:
    """The containers among arguments, each once."""
    seen = set[int]()

    def walk(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[ContainerPlace, Any]]:
        contents = _contents(value)
        if contents is None or id(value) in seen:
            return
        seen.add(id(value))
        if len(keys) > 1 and not isinstance(value, tuple):
            yield ContainerPlace(keys), value
        for key, inner in contents.items() if isinstance(contents, Mapping) else enumerate(contents):
            yield from walk(inner, (*keys, key))

    for number, given in enumerate(arguments):
        yield from walk(given, (number,))


def _contents(value: Any) -> Any:
    """The mapping or sequence with the values of a container or tuple; None for anything else."""
    if isinstance(value, MutableMapping | list | tuple):
        return value
    return own_attributes(value) if type(value) in pytree.SUPPORTED_NODES else None


def _change(place: ContainerPlace, now: Any, before: Any) -> Filling | None:
    if isinstance(before, dict):
        new = tuple(key for key, value in now.items() if key not in before or before[key] is not value)
        removed = tuple(key for key in before if key not in now)
        return Filling(place, new, removed) if new or removed else None
    new = tuple(index for index, value in enumerate(now) if index >= len(before) or before[index] is not value)
    return Filling(place, new, length=len(now)) if new or len(now) != len(before) else None


def answer(output: Any, arguments: CallArguments, fillings: Sequence[Filling]) -> Any:
    """The result of a call, and with fillings also the values that it has put into its arguments, as one tree.

    Containers among the arguments are not repeated in it.
    """
    if not fillings:
        return output
    places = {id(value): place for place, value in containers(arguments)}
    told = pytree.tree_map(lambda leaf: places.get(id(leaf), leaf), output, is_leaf=lambda each: id(each) in places)
    return told, [filling.read(arguments) for filling in fillings]


def delivered(tree: Any, arguments: CallArguments, fillings: Sequence[Filling]) -> Any:
    """The result in a tree that `answer` made of a like call; puts the other values into these arguments."""
    if not fillings:
        return tree
    output, contents = tree
    for filling, values in zip(fillings, contents, strict=True):
        filling.write(arguments, values)
    return pytree.tree_map(lambda leaf: leaf.find(arguments) if isinstance(leaf, ContainerPlace) else leaf, output)


def answering(function: Any, fillings: Sequence[Filling], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and return its `answer`."""
    return answer(function(*args, **kwargs), (args, kwargs), fillings)
