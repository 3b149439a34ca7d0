"""The attributes on which the captures of a module's steps depend, known to all ranks of a pipeline.

A forward that is cut does not run as Python, but as the calls that were recorded, with the values of the attributes at
that time: a temperature, a flag of a warm-up, `training`. The step itself runs as Python, but which modules it calls,
and with what, may follow from flags and from what is None. Where such an attribute changes, the step is captured anew.

The step changes attributes on the rank that runs it alone, so that rank announces its values with each mini-batch;
hooks between then and the step run on all ranks, and each notes what they change.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from enum import Enum
from types import MethodType
from typing import Any, Final, TypeVar

import numpy as np
from torch import Tensor, nn

from lightning_gpp.capture.attributes import (
    CONTAINERS,
    MOST_ITEMS,
    TOLD,
    Attribute,
    AttributePlace,
    copy_of,
    dotted,
    has_settings,
    is_plain,
    same_contents,
    same_value,
)

_MOST_KNOWN: Final = 8
"""Tensors and objects of an attribute that are known again; those that were replaced long ago are new ones."""
_SENT: Final = (*TOLD, np.ndarray)
"""Types of values that are given to other ranks, besides plain ones."""


class OwnValue(Enum):
    """Stands for a value that each rank keeps as it has it."""

    KEPT = "kept"


KEPT: Final = OwnValue.KEPT


class FrozenAttributes:
    """The attributes that the captures of a module's steps depend on; false if there are none."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known_places: dict[tuple[int, str], Attribute] = {}
        self._readers: dict[Attribute, Callable[[], Any]] = {}
        self._values: dict[Attribute, Any] = {}
        self._contents: dict[Attribute, Any] = {}
        """Copies of values that may change without being replaced."""
        self._words: dict[Attribute, str] = {}
        self._first: dict[Attribute, str] = {}
        self._announced: dict[Attribute, str] = {}
        self._live: set[Attribute] = set()
        self._objects: set[Attribute] = set()
        """Attributes with other values inside, which have places of their own."""
        self._around: set[Attribute] = set()
        """These, and dictionaries of which an item has a place of its own."""
        self._known: dict[Attribute, deque[tuple[int, Any]]] = {}
        self._changes = 0

    def add(self, frozen: Mapping[Attribute, Any], live: Mapping[Attribute, Any]) -> None:
        """Note the attributes of a capture, and their values.

        Args:
            frozen: those of forwards that are cut, and those that decide what the step passes to them.
            live: those that the step reads, of which a number or the values of a tensor may change; flags and texts may
                decide which modules it calls.
        """
        cut = self._placed(frozen.keys())  # first, because they count where the step reads the same place
        new = (cut | self._placed(live.keys())) - self._first.keys() | (cut & self._live)
        self._live = (self._live | new) - cut
        given = {**live, **frozen}
        values = {key: given[key] if key in given else self._readers[key]() for key in new}
        self._objects |= {key for key in new if has_settings(values[key]) or isinstance(values[key], nn.Module)}
        self._around = self._objects | {(path, name.rpartition(".")[0]) for path, name in self._readers}
        self._note(values)
        described = {key: self._described(key, self._values[key]) for key in new}
        self._words = {**self._words, **described}
        self._first |= described
        self._announced = {**self._announced, **described}

    def _placed(self, keys: Set[Attribute]) -> set[Attribute]:
        """Note where these attributes are. Returns those that stand for them, as modules may share an object."""
        return {self._stand_in(key) for key in sorted(keys)}

    def _stand_in(self, key: Attribute) -> Attribute:
        if key not in self._readers:
            place = AttributePlace(self._module, key)
            known = self._known_places.setdefault(place.id, key)
            if known != key:
                return known
            self._readers[key] = place.reader
        return key

    def _note(self, values: Mapping[Attribute, Any]) -> None:
        self._values |= values
        alike = self._objects | {key for key in self._live if not isinstance(values.get(key), dict)}
        containers = {key: copy_of(value) for key, value in values.items() if key not in alike}
        kept = {key: value for key, value in self._contents.items() if key not in values}
        self._contents = {**kept, **{key: value for key, value in containers.items() if value is not None}}

    def __bool__(self) -> bool:
        return bool(self._readers)

    def announce(self) -> int:
        """0 if all have the values of the first capture, otherwise a number for their values; notes the values."""
        now = self._now()
        if now is not self._announced:
            self._announced, self._changes = now, _fingerprint(now, self._first)
        return self._changes

    def since(self, *, alone: bool = False) -> int:
        """The same for what hooks have changed since the announcement, on all ranks.

        `alone`: there is one rank. With others, what the step reads does not count: hooks may have changed it by what
        the step has changed on its rank alone.
        """
        now = self._now()
        if now is self._announced:
            return 0
        same = {key: value for key, value in now.items() if alone or key not in self._live}
        return _fingerprint(same, self._announced)

    def names(self) -> str:
        """The attributes that have other values than in the first capture."""
        return ", ".join(map(dotted, sorted(self.changes()))) or "An attribute"

    def changes(self) -> dict[Attribute, Any]:
        """These attributes, with their values; with KEPT for functions, modules and other objects."""
        changed = [key for key, value in self._now().items() if value != self._first[key]]
        values = {key: self._readers[key]() for key in changed}
        return {key: value if is_plain(value) or isinstance(value, _SENT) else KEPT for key, value in values.items()}

    def _now(self) -> dict[Attribute, str]:
        """All values in words; the same dictionary until one changes. This runs twice in every step."""
        changed = self._replaced()
        if not self._around.isdisjoint(changed):
            self._readers = {key: AttributePlace(self._module, key).reader for key in self._readers}
            changed = self._replaced()
        if not changed:
            return self._words
        self._note({key: self._readers[key]() for key in changed})
        words = {key: self._described(key, self._values[key]) for key in changed}
        if any(self._words[key] != word for key, word in words.items()):
            self._words = {**self._words, **words}
        return self._words

    def _replaced(self) -> list[Attribute]:
        values = self._values
        replaced = [key for key, read in self._readers.items() if read() is not values[key]]
        return replaced + [key for key, before in self._contents.items() if not same_contents(before, values[key])]

    def _described(self, key: Attribute, value: Any) -> str:
        if key in self._live and not isinstance(value, bool | str | dict | tuple | None):
            return "tensor" if isinstance(value, Tensor) else type(value).__qualname__
        if isinstance(value, CONTAINERS) and len(value) <= MOST_ITEMS:
            items = [self._described(key, item) for item in (value.items() if isinstance(value, dict) else value)]
            in_order = sorted(items) if isinstance(value, set | frozenset) else items
            return f"{type(value).__qualname__} {in_order}"
        if isinstance(value, np.ndarray):
            return f"array {value.shape} {zlib.crc32(value.tobytes())}"
        return repr(value) if isinstance(value, TOLD) else f"{type(value).__qualname__} {self._number(key, value)}"

    def _number(self, key: Attribute, value: Any) -> int:
        """The number of a tensor or object in the order in which the attribute has had them."""
        most = MOST_ITEMS if isinstance(self._values[key], CONTAINERS) else _MOST_KNOWN
        seen = self._known.setdefault(key, deque(maxlen=most))
        for number, known in seen:
            if known is value or (isinstance(value, MethodType) and value == known):  # made anew by every access
                return number
        number = 1 + seen[-1][0] if seen else 0
        seen.append((number, value))
        return number


def _fingerprint(now: Mapping[Attribute, str], before: Mapping[Attribute, str]) -> int:
    changed = sorted((key, value) for key, value in now.items() if value != before[key])
    return zlib.crc32(repr(changed).encode()) if changed else 0


def adopt(module: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes the values of the rank that runs the step, where they are others."""
    for attribute, value in values.items():
        place = AttributePlace(module, attribute)
        if value is not KEPT and not same_value(place.read(), value):
            place.write(value)


T = TypeVar("T")

_MOST_LIKE: Final = 8
"""Sessions of one form that are kept; each takes memory."""
_ALL: Final = 256
"""Sessions of all forms that are kept; with dynamic padding every length of sequences is a form."""
_OFTEN: Final = 4
"""Captures of one form after which a warning says that they cost time."""


class SessionCache(dict[tuple[Hashable, Hashable], T]):
    """Sessions by the form of a mini-batch or call, and by what stands for Python values.

    The latest are kept, of all and of those that differ only in Python values.

    Args:
        warn: warns the user.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn
        self._counts: dict[Hashable, int] = {}

    def make(self, key: tuple[Hashable, Hashable], make: Callable[[], T], changing: Callable[[], str]) -> T:
        """Make the session for a form and Python values. `changing`: names the values that change, for a warning."""
        same = [known for known in self if known[0] == key[0]]
        if len(same) == _MOST_LIKE or len(self) == _ALL:
            del self[same[0] if len(same) == _MOST_LIKE else next(iter(self))]
        self[key] = made = make()
        self._count(key[0], changing)
        return made

    def _count(self, form: Hashable, changing: Callable[[], str]) -> None:
        self._counts[form] = count = self._counts.get(form, 0) + 1
        if count == _OFTEN:
            self._warn(
                f"{changing()} changed {count - 1} times, and each time the step was captured anew, because what is "
                "cut into stages runs with the values of its capture. That takes time: pass values that change often "
                "as tensors, keep the module that reads them in one stage (strategy.stages), or let the step run as "
                "a whole (strategy.step=whole)."
            )
