"""The form of a mini-batch: its fingerprint, an outline of it for all ranks, what was made for it; and the feed that
reads mini-batches ahead.

Consecutive mini-batches of one form are a segment. At its first one a pipeline that does not flush fills, at its last
one it drains; in between every rank works on several mini-batches.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import GUESSED, BatchDims, known_to_pytree, samples_in, slice_batch
from lightning_gpp.errors import ScheduleError, ShapeError
from lightning_gpp.schedules import Program
from lightning_gpp.wording import with_article


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
    leaves, spec = pytree.tree_flatten(slice_batch(batch, 0, 1, total, dims))
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
            _check_sendable(leaf)
            return leaf
        limit = _FEW_NUMBERS if leaf.is_floating_point() else _MANY_NUMBERS
        if leaf.is_meta or leaf.numel() > limit or leaf.dtype in UNREADABLE:
            return leaf.to("meta")
        return leaf.detach().cpu().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(outlined, known_to_pytree(batch))


def _check_sendable(leaf: Any) -> None:
    """Refuse what other ranks, which capture the step, too, cannot get.

    Raises:
        ShapeError: names the class.
    """
    try:
        pickle.dumps(leaf)
    except Exception as error:  # whatever classes raise
        raise ShapeError(
            f"The mini-batch has {with_article(type(leaf).__name__)}, which cannot be sent to other ranks: {error}. "
            "Let the data loader's collate_fn return tensors in lists, tuples or dicts."
        ) from error


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
                "as tensors."
            )
