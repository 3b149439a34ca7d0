"""The next mini-batch, and the attributes on which its capture depends, known to all ranks of a pipeline.

A forward that is cut does not run as Python, but as the calls that were recorded, with the values of the attributes at
that time: a temperature, a flag of a warm-up, `training`. The step itself runs as Python, but which modules it calls,
and with what, may follow from flags and from what is None. Where such an attribute changes, the step is captured anew.

The step changes attributes on the rank that runs it alone, so that rank announces its values with each mini-batch;
hooks between then and the step run on all ranks, and each notes what they change.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from types import MethodType
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from lightning_gpp._compat.torch import trained_flags
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
from lightning_gpp.capture.batch import GUESSED, UNCOUNTED, BatchDims, samples_in
from lightning_gpp.capture.known_values import values_at
from lightning_gpp.stages.division import Division
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.batches import Facts, Feed, outer_form, signature

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


_MOST_FORMS: Final = 1000
"""Forms of mini-batches that are kept, for sequences of many lengths."""

_UNKNOWN: Final = (-1, -1)
_OTHERS: Final = 1 << 61
"""Marks the form of a mini-batch with other values than those on which captures of its form depend."""
_ANEW, _THAWED = 1, 2
"""Flags of an announcement: it replaces earlier ones; parameters were frozen or unfrozen since the last one."""


class Incoming:
    """Announces the next mini-batch to the ranks of a pipeline.

    Attributes:
        batch_size: samples of the latest mini-batch announced.
        form: a fingerprint of its structure and of the set of trained parameters, see `follow_hooks`.
        frozen: the attributes that captures depend on.
        frozen_values: stands for their values, 0 for those of the first capture.
        facts: its facts, and those of the known mini-batches after it.
        feed: has the number of mini-batches to announce before their turn and, on the rank that runs the step, these.
        anew: whether the latest mini-batch replaces others that were announced before.
        has_others: whether it has other values than those on which captures of its form depend; known where the step
            runs.
    """

    def __init__(self, module: nn.Module, control: Control, dims: BatchDims | None = None) -> None:
        self.module, self.control, self._dims = module, control, dims or GUESSED
        self.batch_size, self.form, self.frozen_values = 0, 0, 0
        self.frozen = FrozenAttributes(module)
        self.facts: list[Facts] = []
        self.feed = Feed()
        self.anew = self.has_others = False
        self._upcoming: list[tuple[Any, tuple[int, int]]] = []
        self._known: dict[Hashable, tuple[int, int]] = {}
        self._decided: dict[int, dict[int, int]] = {}
        self.follow()

    def count_by(self, dims: BatchDims | None) -> None:
        """Count samples along other dimensions."""
        self._dims = dims or GUESSED

    def follow(self) -> None:
        """Take up the module's parameters again after they were replaced."""
        self.parameters = list(self.module.parameters())
        self._announced = self.trained()

    @contextmanager
    def fed_by(self, feed: Feed) -> Iterator[None]:
        """Inside, mini-batches come from this feed."""
        before, self.feed = self.feed, feed
        try:
            yield
        finally:
            self.feed = before

    def announce(self, batch: Any, *, anew: bool = False) -> bool:
        """Share the facts of a mini-batch; returns False if it is None. Only the arguments of the step's rank count.

        Args:
            batch: the mini-batch.
            anew: whether it replaces others that were announced before.
        """
        ahead = self.feed.ahead()
        values = self.frozen.announce() if self.frozen else 0
        trained = self.trained()
        thawed, self._announced = trained != self._announced, trained  # by hooks, or where the step runs
        facts = [_UNKNOWN] * (2 + ahead)
        if self.control.runs_step and batch is not None:
            known = self._facts_of([batch, *self.feed.upcoming[:ahead]])
            facts = [*known, *facts[len(known) : -1], (_ANEW * anew + _THAWED * thawed, values)]
        *rows, (flags, self.frozen_values) = self.control.share_pairs(facts)
        self.anew = flags > 0 and bool(flags & _ANEW)
        if flags > 0 and flags & _THAWED:
            self.train_as(self.control.share_object(trained))
        self.facts = [Facts(size, form) for size, form in rows if size >= 0]
        self.batch_size, self.form = rows[0]
        return bool(self.facts)

    def divided(self, batch: Any, division: Division) -> tuple[list[tuple[int, int, bool]], list[Any]]:
        """The samples and forms of the micro-batches of the announced mini-batch, on all ranks, with whether they have
        other values (`has_others`); and on the rank that runs the step, the micro-batches.
        """
        facts, parts = list[tuple[int, int, bool]](), list[Any]()
        if self.control.runs_step:
            parts, trained = division.parts(batch), _flags_number(self._announced)
            for part, size in zip(parts, division.sizes(parts), strict=True):
                form = signature(part, UNCOUNTED)
                other = self._has_others(part, form)
                facts.append((size, form ^ trained ^ (_OTHERS * other), other))
        return self.control.share_object(facts), parts

    @contextmanager
    def taken_for(self, facts: tuple[int, int, bool]) -> Iterator[None]:
        """Inside, a micro-batch is the latest mini-batch announced."""
        before = self.batch_size, self.form, self.has_others
        self.batch_size, self.form, self.has_others = facts
        try:
            yield
        finally:
            self.batch_size, self.form, self.has_others = before

    def follow_hooks(self) -> None:
        """Note in the form which parameters hooks have frozen or unfrozen since the announcement, on all ranks.

        The form differs by what they changed alone: ranks may not know yet what the step has changed where it runs.
        """
        trained = self.trained()
        if trained != self._announced:
            self.form ^= _flags_number(trained) ^ _flags_number(self._announced)
            self._announced = trained

    def _described(self, batch: Any) -> tuple[int, int]:
        key = outer_form(batch)
        if key in self._known:
            return self._known[key]
        total = samples_in(batch, self._dims)
        described = total, signature(batch, self._dims, total)
        if key is not None and len(self._known) < _MOST_FORMS:
            self._known[key] = described
        return described

    def form_of(self, batch: Any, dims: BatchDims | None = None) -> int:
        """Fingerprint of all that a capture depends on: the batch's structure, and the set of trained parameters."""
        return signature(batch, self._dims if dims is None else dims) ^ _flags_number(self.trained())

    def _facts_of(self, batches: Sequence[Any]) -> list[tuple[int, int]]:
        """Samples and form of consecutive mini-batches; each is looked at once, when it is announced first."""
        seen = {id(batch): described for batch, described in self._upcoming}
        described = [seen.get(id(batch)) or self._described(batch) for batch in batches]
        self._upcoming = list(zip(batches[1:], described[1:], strict=True))
        trained = _flags_number(self._announced)
        others = [self._has_others(batch, form) for batch, (_, form) in zip(batches, described, strict=True)]
        self.has_others = others[0]
        return [
            (size, form ^ trained ^ (_OTHERS * other)) for (size, form), other in zip(described, others, strict=True)
        ]

    def depend_on(self, decided: Mapping[int, int], batch: Any, dims: BatchDims) -> None:
        """Note that a capture is valid only for batches of this form that have these values, see `Capture.decided`."""
        known = self._decided.setdefault(signature(batch, dims), {}) if decided else {}
        for leaf, value in decided.items():
            known.setdefault(leaf, value)

    def _has_others(self, batch: Any, form: int) -> bool:
        """True if a batch has other values than those on which captures of its form depend."""
        decided = self._decided.get(form)
        return decided is not None and values_at(batch, decided) != decided

    def trained(self) -> bytes:
        """A byte per parameter of the module: 1 if it requires a gradient, otherwise 0."""
        return trained_flags(self.parameters)

    def train_as(self, trained: bytes) -> None:
        """Make the marked parameters, and no others, require a gradient."""
        for parameter, flag in zip(self.parameters, trained, strict=True):
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))
        self._announced = trained


def _flags_number(trained: bytes) -> int:
    return zlib.crc32(trained) << 16
