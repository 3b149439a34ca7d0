"""Iterators that modules keep (`self.unlabelled = iter(loader)`): what a copy of a module reads stays for the module.

An iterator cannot be copied, so the first copy of a module puts a `KeptIterator` in its place. Copies read on from
where the module is; what they read is kept until the module reads it itself.
"""

from __future__ import annotations

import io
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from lightning_gpp._compat.torch import without_modes
from lightning_gpp.errors import CaptureError

_READING: Final = ("read", "read1", "readinto", "readline", "readlines", "readall", "__next__", "__iter__")
_DROPPED: Final[dict[str, Callable[..., Any]]] = {"write": len, "writelines": lambda lines: None}
"""Methods of files that write, as copies have them."""
_DEEPEST: Final = 4
_MOST_ITEMS: Final = 1000
"""Items of the largest containers that are looked into."""


class _LikeSource(Iterator[Any]):
    """An iterator that seems to be another one. `_only_next`: whether methods of that one would change what is read."""

    _source: Iterator[Any]

    @property
    def _only_next(self) -> bool:
        return True

    def __bool__(self) -> bool:
        return bool(self._source)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # an iterator without a length has none here, either

    @property  # type: ignore[misc]  # for isinstance
    def __class__(self) -> type[Any]:
        return type(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in ("_source", "__setstate__"):  # while it is unpickled
            raise AttributeError(name)
        value = getattr(self._source, name)
        if callable(value) and self._only_next:
            raise _called(name)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterator[Any]:
        return self._copied()

    @abstractmethod
    def _copied(self) -> _CopiedIterator:
        """An iterator that reads on from here, and leaves everything for this one."""


class KeptIterator(_LikeSource):
    """An iterator of which copies read ahead; otherwise it is as the one that it is made of.

    What is read ahead draws from a stream of random numbers of its own, which begins with that of the moment.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._kept, self._first = source, deque[Any](), 0
        self._random = torch.get_rng_state()

    @property
    def _only_next(self) -> bool:
        return bool(self._kept)

    def __next__(self) -> Any:
        item = self._kept.popleft() if self._kept else next(self._source)
        self._first += 1
        return item

    def __reduce__(self) -> Any:
        return itertools.chain, (list(self._kept), self._source)

    def _copied(self) -> _CopiedIterator:
        return _CopiedIterator(self, self._first)

    def _at(self, place: int) -> tuple[Any, int]:
        """The first item from a place on that this one has not read yet, and the place behind it."""
        place = max(place, self._first)
        while len(self._kept) <= place - self._first:
            with without_modes(), torch.random.fork_rng(devices=[]):  # the item is made here, and training gets it
                torch.set_rng_state(self._random)
                self._kept.append(next(self._source))
                self._random = torch.get_rng_state()
        return self._kept[place - self._first], place + 1


class _CopiedIterator(_LikeSource):
    """The iterator of a copy. `is_read`: whether somebody asked for an item."""

    def __init__(self, origin: KeptIterator, place: int) -> None:
        self._source, self._origin, self._place, self.is_read = origin._source, origin, place, False

    def __next__(self) -> Any:
        self.is_read = True
        item, self._place = self._origin._at(self._place)
        return item

    def _copied(self) -> _CopiedIterator:
        return _CopiedIterator(self._origin, self._place)


class _CopiedFile:
    """An open file in a copy: what a copy writes is dropped, as what it prints."""

    def __init__(self, file: io.IOBase) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if name in ("_file", "__setstate__"):
            raise AttributeError(name)
        return _DROPPED.get(name) or getattr(self._file, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopiedFile:
        return self


class _CopiedReadableFile(_CopiedFile):
    """One that could be read; a copy may not, because nobody could put back what was read."""

    def __getattr__(self, name: str) -> Any:
        if name in _READING:
            raise CaptureError(
                f"The step reads the open file {getattr(self._file, 'name', '')!r} (.{name}()). Set-up runs the step "
                "on a copy of the module, so training would start with later lines. Keep an iterator over its lines in "
                "the module (self.lines = iter(file.readlines()), or csv.reader(file)) and call next() on that."
            )
        return super().__getattr__(name)

    def __next__(self) -> Any:
        return self.__getattr__("readline")

    def __iter__(self) -> Any:
        return self.__getattr__("readlines")


def _copied_file(file: io.IOBase) -> _CopiedFile:
    return _CopiedReadableFile(file) if not file.closed and file.readable() else _CopiedFile(file)


def _called(name: str) -> CaptureError:
    return CaptureError(
        f"The step calls .{name}() of an iterator that the module keeps. Set-up runs the step on a copy of the module, "
        "which can read ahead with next() alone: anything else would change what training gets. Read it with next(), "
        "or let the data have its samples."
    )


def readers(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Stand-ins for a copy of modules, by the id of what they replace: iterators, also in lists and dictionaries that
    are attributes, and open files.
    """
    made: dict[int, KeptIterator] = {}
    found: dict[int, Any] = {}
    for module in modules:
        for container, (*_, key), value in _iterators(vars(module)):
            wrapped: Any = value if type(value) in _WRAPPED else made.setdefault(id(value), KeptIterator(value))
            container[key], found[id(wrapped)] = wrapped, wrapped._copied()
        found |= {id(value): _copied_file(value) for value in vars(module).values() if isinstance(value, io.IOBase)}
    return found


@contextmanager
def iterators_unread(copied: nn.Module, step: str) -> Iterator[None]:
    """Refuse a step that reads iterators of a copy inside, or keeps one that it made: each micro-batch would read some.

    Raises:
        CaptureError: it does.
    """
    before = _named(copied)
    yield
    after = _named(copied).items()
    read = [name for name, value in before.items() if type(value) is _CopiedIterator and value.is_read]
    if names := [*read, *(name for name, value in after if type(value) not in _WRAPPED and name not in read)]:
        raise CaptureError(
            f"{step} reads items of an iterator that the module keeps ({', '.join(names)}): each micro-batch would "
            "read items of its own, where one process reads them once for a mini-batch. Choose strategy.step=whole, or "
            "let the data have both loaders (Lightning's CombinedLoader)."
        )


def _named(module: nn.Module) -> dict[str, Iterator[Any]]:
    return {
        ".".join(map(str, [*filter(None, [path]), *keys])): value
        for path, part in module.named_modules()
        for _, keys, value in _iterators(vars(part))
    }


def _iterators(container: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...], Iterator[Any]]]:
    """Iterators in a container and those in it, with the container that they are in, and all keys down to them."""
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase | nn.Module):
            yield container, (*above, key), value
        elif type(value) in (dict, list) and len(value) <= _MOST_ITEMS and len(above) < _DEEPEST:
            yield from _iterators(value, (*above, key))


_WRAPPED: Final = (KeptIterator, _CopiedIterator)
