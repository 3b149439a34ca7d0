"""Values that a recording knows: those of tensors into which neither a parameter nor the mini-batch has gone.

Modules read values, and decide by them: whether positions begin anew inside of a row, whether a mask is causal, which
mask attention needs at all. Fake tensors have no values, and code that sees fake tensors may take another way than it
takes in training. So tensors that are made of numbers alone (`arange`, `ones`, `tensor`) and what is computed from them
are real ones, on which all decisions are those of training. Their calls are recorded like any others.

    arange ─► expand ─► diff ─► == ─► all ─► bool     real: the recording reads what training would read
       └────► embedding(parameter) ─► ...             fake from here on

A real tensor into which an unknown value is written becomes unknown. It stays the same object, as its views do, and
takes part in further calls as a fake tensor would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor

from lightning_gpp._compat.torch import (
    FakeTensor,
    TorchDispatchMode,
    pytree,
    storage_id,
    unset_fake_temporarily,
)
from lightning_gpp.capture.batch import known_to_pytree
from lightning_gpp.runtime.operands import changed_by, changes, tensors_in

MOST_NUMBERS: Final = 1 << 20
"""Elements of the largest tensor whose values are known."""

_aten = torch.ops.aten
_OF_A_SHAPE: Final = frozenset(
    (_aten.ones_like, _aten.zeros_like, _aten.full_like, _aten.new_ones, _aten.new_zeros, _aten.new_full)
)
"""Functions whose result has the shape of a tensor, but none of its values."""
_EMPTY: Final = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted)
)
_LITERAL: Final = frozenset((_aten.lift_fresh, _aten.lift_fresh_copy))
"""The functions that `torch.tensor` calls."""
_UNFORESEEABLE: Final = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))

_WHOLE: Final = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

_FOR_REAL = ContextVar("for_real", default=False)


@contextmanager
def for_real() -> Iterator[None]:
    """Inside, code computes with real tensors, although a recording is under way."""
    token = _FOR_REAL.set(True)
    try:
        with unset_fake_temporarily():
            yield
    finally:
        _FOR_REAL.reset(token)


class KnownValues(TorchDispatchMode):
    """Keeps tensors with known values real; to be entered inside of a mode for fake tensors.

    `on_read` is called before a number, or the shape of a result, depends on known values.
    """

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_read = WeakMethod(on_read)  # the recorder owns this mode
        self._known: dict[int, bool] = {}
        """True for a storage whose values are known; it has only storages of real tensors that were made here."""
        self._alive: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Let the values of a real tensor be known, which is nobody else's."""
        self._known[storage_id(tensor)] = True
        self._alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """True if the values of a tensor are known."""
        return self._is_made(tensor) and self._known[storage_id(tensor)]

    def is_unknown(self, tensor: Tensor) -> bool:
        """True for a tensor of the recording whose values are unknown; False for the user's own real ones, too."""
        return isinstance(tensor, FakeTensor) or (self._is_made(tensor) and not self._known[storage_id(tensor)])

    def _is_made(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and tensor.layout is torch.strided and storage_id(tensor) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _FOR_REAL.get():
            return func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        made = [tensor for tensor in tensors if self._is_made(tensor)]
        if self._is_computable(func, tensors, made, args, kwargs):
            return self._computed(func, args, kwargs)
        return self._outlined(func, args, kwargs) if made else func(*args, **kwargs)

    def _is_computable(
        self, func: Any, tensors: Sequence[Tensor], made: Sequence[Tensor], args: Any, kwargs: Any
    ) -> bool:
        """True if a call can be computed: the values of its operands are known, or of no account."""
        packet, tags = getattr(func, "overloadpacket", None), getattr(func, "tags", ())
        if getattr(func, "namespace", "") != "aten" or packet in _EMPTY or torch.Tag.nondeterministic_seeded in tags:
            return False
        if packet in _LITERAL:
            return type(tensors[0]) is Tensor
        if packet in _OF_A_SHAPE:
            return _is_small(self._outlined(func, args, kwargs))
        if len(made) < len(tensors):
            return False
        if func.is_view or torch.Tag.inplace_view in tags:
            return True  # a view of an unknown tensor is as unknown
        return all(map(self.knows, made)) and self._may_compute(func, args, kwargs)

    def _may_compute(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not _UNFORESEEABLE.isdisjoint(func.tags):
            self._read()
            return True
        return bool(changes(func)) or _is_small(self._outlined(func, args, kwargs))

    def _read(self) -> None:
        if (on_read := self._on_read()) is not None:
            on_read()

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with for_real():
            result = func(*pytree.tree_map(_as_real, args), **pytree.tree_map(_as_real, kwargs))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not self._is_made(leaf):
                self.add(leaf)
        return result

    def _outlined(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call on fake tensors; made tensors that it writes into become unknown."""
        originals: dict[int, Tensor] = {}

        def blank(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and self._is_made(leaf)):
                return leaf
            fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            originals[id(fake)] = leaf
            return fake

        given, named = pytree.tree_map(blank, (args, kwargs))
        result = func(*given, **named)
        for leaf in changed_by(func, given, named):
            if id(leaf) in originals:
                self._known[storage_id(originals[id(leaf)])] = False
        return pytree.tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def _is_small(outline: Any) -> bool:
    """True if a result can be computed on this machine, and does not take much memory."""
    tensors = [leaf for leaf in pytree.tree_leaves(outline) if isinstance(leaf, Tensor)]
    computable = all(is_present(each.device) and each.layout is torch.strided for each in tensors)
    return bool(tensors) and computable and sum(each.numel() for each in tensors) <= MOST_NUMBERS


def is_present(device: torch.device) -> bool:
    """True if this machine can compute on a device."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def _as_real(leaf: Any) -> Any:
    """A tensor of the shape of a fake one, of whose values nothing is read."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    if leaf.numel() > MOST_NUMBERS:
        return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


def uniform_values(batch: Any) -> dict[int, int]:
    """The value of every tensor of whole numbers or flags whose elements are all the same, such as a mask without
    padding, by its number among the leaves of the batch.

    What a forward reads of them (`mask.all()`) is the same for all micro-batches. So a capture may depend on it, as
    long as mini-batches that have other elements there get another capture.
    """
    leaves = pytree.tree_leaves(known_to_pytree(batch))
    found = values_at(batch, (number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))
    return {number: value for number, value in found.items() if value is not None}


def values_at(batch: Any, numbers: Iterable[int]) -> dict[int, int | None]:
    """The values of these leaves; None for those that have several."""
    leaves = pytree.tree_leaves(known_to_pytree(batch))
    return {number: _value(leaves[number]) for number in numbers}


def _value(tensor: Tensor) -> int | None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype not in _WHOLE:
        return None
    if tensor.is_meta or not 0 < tensor.numel() <= MOST_NUMBERS:
        return None
    least, most = torch.stack([tensor.min(), tensor.max()]).tolist()
    return int(least) if least == most else None
