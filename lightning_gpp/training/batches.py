"""The form of a mini-batch: its fingerprint, and an outline without memory."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.batch import GUESSED, BatchDims, known_to_pytree, map_samples, samples_in


def signature(batch: Any, dims: BatchDims = GUESSED) -> int:
    """A 63-bit fingerprint of a batch's structure, dtypes and shapes, whatever the samples and their number."""
    total = samples_in(batch, dims)
    one = map_samples(batch, total, lambda tensor, dim: tensor.narrow(dim, 0, 1), lambda items: items[:1], dims)
    leaves, spec = pytree.tree_flatten(one)
    text = repr([str(spec), *map(_describe, leaves)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__qualname__


def outline(batch: Any) -> Any:
    """The batch with every tensor replaced by one without memory."""
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, known_to_pytree(batch))
