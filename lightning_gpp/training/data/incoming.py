"""The next mini-batch: its number of samples and its form, known to all ranks of a pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from lightning_gpp.capture.batch import GUESSED, BatchDims, samples_in
from lightning_gpp.capture.uniform import values_at
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.batches import outer_form, signature
from lightning_gpp.training.data.segments import Facts, Feed
from lightning_gpp.training.dependencies.frozen_attributes import FrozenAttributes
from lightning_gpp.training.tensors.parameters import trained_flags

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
            self.form ^= _fingerprint(trained) ^ _fingerprint(self._announced)
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
        return signature(batch, self._dims) ^ _fingerprint(self.trained())

    def _facts_of(self, batches: Sequence[Any]) -> list[tuple[int, int]]:
        """Samples and form of consecutive mini-batches; each is looked at once, when it is announced first."""
        seen = {id(batch): described for batch, described in self._upcoming}
        described = [seen.get(id(batch)) or self._described(batch) for batch in batches]
        self._upcoming = list(zip(batches[1:], described[1:], strict=True))
        trained = _fingerprint(self._announced)
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


def _fingerprint(trained: bytes) -> int:
    return zlib.crc32(trained) << 16
