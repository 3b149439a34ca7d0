"""Tensors of a mini-batch whose elements are all the same, such as a mask without padding.

What a forward reads of them (`mask.all()`) is the same for all micro-batches. So a capture may depend on it, as long as
mini-batches that have other elements there get another capture.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import known_to_pytree
from lightning_gpp.capture.known_values import MOST_NUMBERS


def uniform_values(batch: Any) -> dict[int, int]:
    """The value of every such tensor of whole numbers or flags, by its number among the leaves of the batch."""
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


_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
