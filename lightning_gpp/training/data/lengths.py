"""Sessions for mini-batches of another length, made from those of other lengths without a capture.

With dynamic padding nearly every mini-batch has sequences of another length. All that depends on the length are
numbers (`stages/sizes.py`). So a few lengths are captured. If their numbers lie on one line, those of a length between
them do, too. The second length that a run meets is not captured itself, but a shorter and a longer one, so that most
of those to come lie between. A network that takes another way for some lengths has other stages there; a length that
does not lie between like ones is captured.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture
from lightning_gpp.capture.batch import GUESSED, BatchDims
from lightning_gpp.capture.known_values import values_at
from lightning_gpp.errors import GPPError
from lightning_gpp.plan import Plan
from lightning_gpp.stages.sizes import are_alike, may_be_resized, numbers_of, resized
from lightning_gpp.training.data.batches import one_sample
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.host import Job
from lightning_gpp.training.session import Session

Array = NDArray[np.float64]
Sizes = tuple[int, ...]
"""The sizes of a mini-batch besides the number of samples: those of all dimensions of its tensors."""

_MOST: Final = 32
"""Captured lengths of one kind of mini-batch that others are made from; and kinds, of which the latest are kept."""
_ROUNDING: Final = 1e-3
"""Errors of whole numbers that were computed."""


class KnownLengths:
    """The captured lengths of all kinds of mini-batches of a run.

    Args:
        job: the job of the run.
        incoming: knows which parameters are trained.
        flushes: whether the pipeline flushes after each mini-batch of training.
    """

    def __init__(self, job: Job, incoming: Incoming, flushes: bool) -> None:
        self._dims, self._incoming = job.dims_in, incoming
        self._apart = job.parallel is not None or not flushes
        self._groups: dict[Hashable, list[Lengths]] = {}

    def session(self, step: str, example: Any, values: Hashable, make: Callable[[Any], Session]) -> Session:
        """A session for a mini-batch of a new form. `make`: captures a mini-batch without memory.

        All ranks call this together, with the same mini-batch.
        """
        if self._apart:
            return make(example)
        key, sizes = self._described(step, example, values)
        serving = [lengths for lengths in self._groups.get(key, ()) if lengths.serves(example)]
        found = next(filter(None, (lengths.made(sizes) for lengths in serving)), None)
        found = found or next(filter(None, (lengths.widened(example, sizes, make) for lengths in serving)), None)
        if found is None:
            found = make(example)
            self._add(key, sizes, found)
        return found

    def _described(self, step: str, example: Any, values: Hashable) -> tuple[Hashable, Sizes]:
        kind, sizes = kind_and_sizes(example, self._dims(step))
        return (step, kind, self._incoming.trained(), values), sizes

    def _add(self, key: Hashable, sizes: Sizes, session: Session) -> None:
        """Add a captured length to those that it is like."""
        if not _is_resizable(session):
            return
        if key not in self._groups and len(self._groups) == _MOST:
            del self._groups[next(iter(self._groups))]
        groups = self._groups.setdefault(key, [])
        if not any(lengths.add(sizes, session) for lengths in groups):
            groups.append(Lengths(sizes, session))


class Lengths:
    """Captured lengths with sessions that differ in numbers alone.

    Args:
        sizes: a first length.
        session: its session.
    """

    def __init__(self, sizes: Sizes, session: Session) -> None:
        self._first, self._sizes = session, sizes
        self._numbers = {sizes: numbers_of(session.pipeline)}
        self._may_widen = True

    def serves(self, example: Any) -> bool:
        """True if a mini-batch has the values on which the captures depend, see `Capture.decided`."""
        decided = _decided(self._first)
        return not decided or values_at(example, decided) == decided

    def add(self, sizes: Sizes, session: Session) -> bool:
        """Add a captured length, if it is like the others; returns whether it is."""
        first = self._first
        if not _is_resizable(session):
            return False
        if _decided(first) != _decided(session) or not _planned_alike(first.plan, session.plan):
            return False
        if not are_alike(first.pipeline, session.pipeline):
            return False
        if len(self._numbers) < _MOST:
            self._numbers[sizes] = numbers_of(session.pipeline)
        return True

    def widened(self, example: Any, sizes: Sizes, make: Callable[[Any], Session]) -> Session | None:
        """A session for this length, after shorter and longer mini-batches are captured; None if they do not serve.

        `example`: a mini-batch of this length, without memory.
        """
        found, known = None, dict(self._numbers)
        whole = len(sizes) == sum(
            leaf.dim() for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)
        )  # a list of samples has several of each
        corners = corners_around(self._sizes, sizes) if whole and self._may_widen else []
        with suppress(GPPError):  # the network may take no sequences of such a length
            new = [corner for corner in corners if corner not in known]
            if new and all(self.add(corner, make(of_sizes(example, sizes, corner))) for corner in new):
                found = self.made(sizes)
        if found is None:
            self._numbers, self._may_widen = known, False
        return found

    def made(self, sizes: Sizes) -> Session | None:
        """A session for this length; None if it does not follow from the captured ones."""
        points, at = np.array(list(self._numbers), dtype=float), np.array(sizes, dtype=float)
        if not _between(points, at):
            return None
        numbers = _on_line(_with_one(points), np.array(list(self._numbers.values())), _with_one(at))
        return None if numbers is None else self._first.resized(resized(self._first.pipeline, numbers))


def _is_resizable(session: Session) -> bool:
    return not session.plan.is_sliced and may_be_resized(session.pipeline)


def _planned_alike(one: Plan, other: Plan) -> bool:
    """True for the same stages, whatever they cost."""
    return len(one.stages) == len(other.stages) and all(
        here == replace(there, figures=here.figures) for here, there in zip(one.stages, other.stages, strict=True)
    )


def _decided(session: Session) -> Mapping[int, int]:
    capture = session.capture
    return capture.decided if isinstance(capture, Capture) else {}


def _with_one(points: Array) -> Array:
    return np.concatenate([np.ones((*points.shape[:-1], 1)), points], axis=-1)


def _on_line(points: Array, values: Array, at: Array) -> list[int] | None:
    """Values at another point, if those of all points are affine functions of them, as more points show than determine
    one; None otherwise.
    """
    rank = np.linalg.matrix_rank(points)
    if len(points) <= rank or np.linalg.matrix_rank(np.vstack([points, at])) > rank:
        return None
    factors = np.linalg.lstsq(points, values, rcond=None)[0]
    found = at @ factors
    errors = np.abs(np.concatenate([(points @ factors - values).ravel(), found - found.round()]))
    return [int(number) for number in found.round()] if (errors < _ROUNDING).all() else None


def _between(points: Array, at: Array) -> bool:
    """True if all sizes are between those of captured lengths, and as far from them as these from each other, or a
    multiple: what is rounded up to a multiple of eight may lie on a line for multiples of eight only.
    """
    low, high = points.min(axis=0), points.max(axis=0)
    steps = np.gcd.reduce((points - low).astype(np.int64), axis=0)
    even = np.where(steps > 0, (at - low).astype(np.int64) % np.maximum(steps, 1), at - low) == 0
    return bool(((low <= at) & (at <= high) & even).all())


def corners_around(known: Sizes, other: Sizes) -> list[Sizes]:
    """Sizes around two others which, with the first ones, show whether numbers are affine functions of them.

    A quarter of all that differ, twice all, and for each but the last twice it alone. Sizes equal in both are one.
    """
    pairs = sorted({pair for pair in zip(known, other, strict=True) if pair[0] != pair[1]})
    lows = {pair: max(2, min(pair) // 4) for pair in pairs}
    if not all(min(pair) > 0 and lows[pair] < pair[0] for pair in pairs):
        return []
    highs = {pair: _beyond(pair[0] - lows[pair], lows[pair], 2 * max(pair)) for pair in pairs}
    choices = [lows, highs, *({pair: highs[pair]} for pair in pairs[:-1])] if pairs else []
    return [tuple(choice.get(pair, pair[0]) for pair in zip(known, other, strict=True)) for choice in choices]


def _beyond(step: int, low: int, least: int) -> int:
    """A size of at least `least` whose distance from `low` has no factor in common with the step."""
    return low + 1 + step * -(-(least - low - 1) // step)


def of_sizes(batch: Any, known: Sizes, wanted: Sizes) -> Any:
    """A mini-batch of other sizes, see `Sizes`: its elements repeat."""
    leaves, structure = pytree.tree_flatten(batch)
    old, new = iter(known), iter(wanted)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = leaf.detach()
        for dim, (size, more) in enumerate([(next(old), next(new)) for _ in leaf.shape]):
            if size != more:
                made = made.index_select(dim, torch.arange(more, device=leaf.device) % size)
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_unflatten([other(leaf) for leaf in leaves], structure)


def kind_and_sizes(batch: Any, dims: BatchDims | None) -> tuple[int, Sizes]:
    """A fingerprint of a mini-batch, whatever its length, and its sizes besides the number of samples."""
    leaves, structure = one_sample(batch, dims or GUESSED)
    kinds = [(str(leaf.dtype), leaf.dim()) if isinstance(leaf, Tensor) else type(leaf).__qualname__ for leaf in leaves]
    sizes = tuple(size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)
    return zlib.crc32(repr((structure, kinds)).encode()), sizes
