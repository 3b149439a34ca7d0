"""Attributes of modules that a capture depends on: where one changes, the step is captured anew.

A forward that is cut does not run as Python, but as the calls that were recorded, with the values of the attributes at
that time: a temperature, a flag of a warm-up, `training`. The step itself runs as Python, but which modules it calls,
and with what, may follow from flags and from what is None.

The step changes attributes on the rank that runs it alone, so that rank announces its values with each mini-batch;
hooks between then and the step run on all ranks, and each notes what they change.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from lightning_gpp.capture.attributes import Attribute, is_plain

_MOST_TENSORS: Final = 64
"""Tensors that are known again; those that were replaced long ago are new ones."""


class FrozenAttributes:
    """The attributes that the captures of a module's steps depend on.

    Attributes:
        some: whether there are any.
    """

    some = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: dict[Attribute, dict[str, Any]] = {}
        self._values: dict[Attribute, Any] = {}
        self._words: dict[Attribute, str] = {}
        self._first: dict[Attribute, str] = {}
        self._announced: dict[Attribute, str] = {}
        self._live: set[Attribute] = set()
        self._inside: set[Attribute] = set()
        """Attributes whose values may change without being replaced."""
        self._tensors: deque[tuple[int, Tensor]] = deque(maxlen=_MOST_TENSORS)
        self._changes = 0

    def add(self, frozen: Mapping[Attribute, Any], live: Mapping[Attribute, Any]) -> None:
        """Note the attributes of a capture, and their values.

        Args:
            frozen: those of forwards that are cut.
            live: those that the step reads, of which a number or the values of a tensor may change.
        """
        values = {**live, **frozen}
        new = values.keys() - self._first.keys()
        self.some = self.some or bool(new)
        self._live |= new - frozen.keys()
        self._owners |= {key: vars(self._module.get_submodule(key[0])) for key in new}
        self._values |= {key: values[key] for key in new}
        self._inside |= {key for key in new - self._live if isinstance(values[key], list | dict | set)}
        described = {key: self._described(key, values[key]) for key in new}
        self._words = {**self._words, **described}
        self._first |= described
        self._announced = {**self._announced, **described}

    def announce(self) -> int:
        """0 if all have the values of the first capture, otherwise a number for their values; notes the values."""
        now = self._now()
        if now is not self._announced:
            self._announced, self._changes = now, _fingerprint(now, self._first)
        return self._changes

    def since(self) -> int:
        """The same for what hooks have changed since the announcement, on all ranks."""
        now = self._now()
        if now is self._announced:
            return 0
        return _fingerprint({key: value for key, value in now.items() if key not in self._live}, self._announced)

    def names(self) -> str:
        """The attributes that have other values than in the first capture."""
        return ", ".join(".".join(filter(None, key)) for key in sorted(self.changes())) or "An attribute"

    def changes(self) -> dict[Attribute, Any]:
        """These attributes, with their values."""
        now = self._now().items()
        return {key: self._owners[key].get(key[1]) for key, value in now if value != self._first[key]}

    def _now(self) -> dict[Attribute, str]:
        """All values in words; the same dictionary until one changes. This runs twice in every step."""
        values, owners = self._values, self._owners
        changed = [key for key, own in owners.items() if own.get(key[1]) is not values[key] or key in self._inside]
        words = {key: self._described(key, owners[key].get(key[1])) for key in changed}
        self._values |= {key: owners[key].get(key[1]) for key in changed}
        if any(self._words[key] != word for key, word in words.items()):
            self._words = {**self._words, **words}
        return self._words

    def _described(self, key: Attribute, value: Any) -> str:
        if isinstance(value, Tensor):
            return "tensor" if key in self._live else f"tensor {self._number(value)}"
        if value is None or isinstance(value, bool) or (key not in self._live and is_plain(value)):
            return repr(value)
        return type(value).__qualname__

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor in the order in which tensors appear; stages read its values, whatever they are."""
        for number, known in self._tensors:
            if known is tensor:
                return number
        number = 1 + self._tensors[-1][0] if self._tensors else 0
        self._tensors.append((number, tensor))
        return number


def _fingerprint(now: Mapping[Attribute, str], before: Mapping[Attribute, str]) -> int:
    changed = sorted((key, value) for key, value in now.items() if value != before[key])
    return zlib.crc32(repr(changed).encode()) if changed else 0


def differing(module: nn.Module, captured: Mapping[Attribute, Any], live: bool = False) -> dict[Attribute, Any]:
    """The attributes of a module that have other values than in a capture. `live`: they are those of the step."""
    found = FrozenAttributes(module)
    found.add(*(({}, captured) if live else (captured, {})))
    return found.changes()


def adopt(module: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes the values of the rank that runs the step, where they are others."""
    for (path, name), value in values.items():
        owner = vars(module.get_submodule(path))
        if not _equal(owner.get(name), value):
            owner[name] = value


def _equal(own: Any, value: Any) -> bool:
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        return own.shape == value.shape and own.dtype == value.dtype and bool((own == value.to(own.device)).all())
    return type(own) is type(value) and bool(own == value)
