"""The next mini-batch, announced to all ranks of a pipeline: its samples and form, and the feed that reads it ahead.

Consecutive mini-batches of one form are a segment. At its first one a pipeline that does not flush fills, at its last
one it drains; in between every rank works on several mini-batches.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import pytree, trained_flags
from lightning_gpp.capture.batch import GUESSED, BatchDims, known_to_pytree, map_samples, samples_in
from lightning_gpp.capture.known_values import values_at
from lightning_gpp.errors import ScheduleError
from lightning_gpp.schedules import Program
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.frozen import FrozenAttributes


def signature(batch: Any, dims: BatchDims = GUESSED, total: int | None = None) -> int:
    """A 63-bit fingerprint of a batch's structure, dtypes and shapes, whatever the samples and their number.

    `total`: the number of samples, if it is known.
    """
    leaves, structure = one_sample(batch, dims, total)
    text = repr([structure, *map(_describe, leaves)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def one_sample(batch: Any, dims: BatchDims = GUESSED, total: int | None = None) -> tuple[list[Any], str]:
    """The leaves and the structure of the first sample of a batch. `total`: the number of samples, if it is known."""
    total = samples_in(batch, dims) if total is None else total
    one = map_samples(batch, total, lambda tensor, dim: tensor.narrow(dim, 0, 1), lambda items: items[:1], dims)
    leaves, spec = pytree.tree_flatten(one)
    return leaves, str(spec)


def outer_form(batch: Any) -> Hashable | None:
    """A key that determines the samples and the signature of a batch; None unless it has plain tensors in plain
    containers. It is found many times faster than these.
    """
    kind = type(batch)
    if kind is Tensor:
        return batch.dtype, batch.shape
    if kind is dict:
        parts, keys = batch.values(), tuple(batch)
    elif kind is list or kind is tuple:
        parts, keys = batch, ()
    else:
        return None
    forms = tuple(map(outer_form, parts))
    return None if None in forms else (kind, keys, forms)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__qualname__


def outline(batch: Any) -> Any:
    """The batch as all ranks get it to capture the step: large tensors are replaced by ones without memory.

    Small ones, and tokens, keep their values, on which the shapes in a module may depend.
    """

    def outlined(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        limit = _FEW_NUMBERS if leaf.is_floating_point() else _MANY_NUMBERS
        if leaf.is_meta or leaf.numel() > limit or leaf.dtype in UNREADABLE:
            return leaf.to("meta")
        return leaf.detach().cpu().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(outlined, known_to_pytree(batch))


UNREADABLE: Final = frozenset({torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2})
"""Types of tensors whose pickles torch 2.13 does not read."""
_FEW_NUMBERS: Final = 1 << 14
"""Elements of a tensor of floating-point numbers that is sent to all ranks with its values, such as boxes."""
_MANY_NUMBERS: Final = 1 << 20
"""The same for whole numbers: a mini-batch of tokens."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a mini-batch that all ranks know: its samples, and a fingerprint of its form."""

    batch_size: int
    form: int


class Segments:
    """Divides the mini-batches of a run, or of a pass over data, into segments, equally on all ranks.

    Args:
        first: number of the first mini-batch.

    Attributes:
        current: the segment of the latest mini-batch, as far as it is known.
    """

    def __init__(self, first: int) -> None:
        self.current = range(first, first)

    def begins_at(self, number: int) -> bool:
        """True if a mini-batch is the first one of a segment."""
        return number >= self.current.stop

    def enter(self, number: int, facts: Sequence[Facts], most: int | None = None) -> range:
        """The segment of a mini-batch, as far as it is known.

        Args:
            number: number of the mini-batch.
            facts: facts about this mini-batch and those that follow.
            most: mini-batches until the next flush, this one included; None lets their forms decide.
        """
        alike = next((i for i, other in enumerate(facts) if other != facts[0]), len(facts))
        first = number if self.begins_at(number) else self.current.start
        self.current = range(first, number + (alike if most is None else min(alike, most)))
        return self.current

    def on_their_way(self, number: int, lead: int) -> range:
        """The mini-batches that any device has started, if `number` is the next one."""
        return range(number, min(number + lead, max(number, self.current.stop)))


def flushed_if_need_be(same_size: bool, continuous: Callable[[], Program], flushed: Callable[[], Program]) -> Program:
    """A program that does not flush; for mini-batches of an unusual size, if there is none, one that flushes.

    Raises:
        ScheduleError: mini-batches of the usual size need a flush.
    """
    try:
        return continuous()
    except ScheduleError:
        if same_size:
            raise
        return flushed()


def later(arguments: Sequence[Any], number: int) -> list[Any]:
    """The arguments of the user's step, except the mini-batch, for the one that comes `number` mini-batches later."""
    rest = list(arguments)
    if number and rest and isinstance(rest[0], int):
        rest[0] += number  # batch_idx
    return rest


class Feed:
    """Reads the mini-batches of a loader ahead, and delivers each at its turn.

    Args:
        ahead: returns the number of mini-batches to read before their turn; called for each.
        prepare: prepares an item of the loader for the user's step, for example moves it to a device.
        left: returns the number of mini-batches that will still be used, this one included; None if unknown.
        group: the group of an item of the loader; mini-batches of another group do not count as upcoming.

    Attributes:
        ahead: see above.
        upcoming: the prepared mini-batches after the current one that were read.
        interrupted: whether a loader was left before its end, with mini-batches upcoming; its reader resets it.
    """

    def __init__(
        self,
        ahead: Callable[[], int] = lambda: 0,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        left: Callable[[], int | None] = lambda: None,
        group: Callable[[Any], Any] = lambda batch: None,
    ) -> None:
        self.ahead, self._prepare, self._left, self._group = ahead, prepare, left, group
        self._waiting: deque[tuple[Any, Any]] = deque()
        self.upcoming: list[Any] = []
        self.interrupted = False

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the unprepared items of the loader; `turn` advances to the prepared ones."""
        self.interrupted = self.interrupted or bool(self._waiting)
        self._waiting.clear()
        rest, given = iter(loader), deque[Any]()
        while True:
            self._read(rest, given)
            if not given:
                return
            yield given.popleft()

    def turn(self) -> tuple[Any, Any]:
        """Advance to the next mini-batch, and return the loader's item and the prepared one."""
        raw, prepared = self._waiting.popleft()
        mine = self._group(raw)
        self.upcoming = [batch for other, batch in self._waiting if self._group(other) == mine]
        return raw, prepared

    def _read(self, rest: Iterator[Any], given: deque[Any]) -> None:
        wanted, left = 1 + self.ahead(), self._left()
        wanted = wanted if left is None else max(1, min(wanted, left))
        while len(given) < wanted:
            try:
                raw = next(rest)
            except StopIteration:
                return
            given.append(raw)
            self._waiting.append((raw, self._prepare(raw)))


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

    def form_of(self, batch: Any) -> int:
        """Fingerprint of all that a capture depends on: the batch's structure, and the set of trained parameters."""
        return signature(batch, self._dims) ^ _flags_number(self.trained())

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

    def depend_on(self, decided: Mapping[int, int], batch: Any) -> None:
        """Note that a capture is valid only for batches of this form that have these values, see `Capture.decided`."""
        known = self._decided.setdefault(signature(batch, self._dims), {}) if decided else {}
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
