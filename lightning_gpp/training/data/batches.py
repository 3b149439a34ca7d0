"""The form of a mini-batch: its fingerprint, an outline of it for all ranks, and what was made for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import GUESSED, BatchDims, known_to_pytree, map_samples, samples_in


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


T = TypeVar("T")

_MOST: Final = 8
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
        if len(same) == _MOST or len(self) == _ALL:
            del self[same[0] if len(same) == _MOST else next(iter(self))]
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
