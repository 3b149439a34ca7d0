"""Cutting of mini-batches along their samples: tensors along the first dimension, lists of samples by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_gpp._compat.torch import pytree
from lightning_gpp.errors import ShapeError


def batch_size_of(batch: Any) -> int:
    """Number of samples: the size of the first dimension of the first tensor that has one.

    Raises:
        ShapeError: no tensor in the batch has a dimension.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ShapeError(
        f"The batch (a {type(batch).__name__}) has no tensor with a batch dimension, so it cannot be cut into "
        "micro-batches. Let the dataloader collate samples into tensors whose first dimension counts the samples."
    )


def slice_batch(batch: Any, start: int, stop: int, total: int) -> Any:
    """Samples `[start, stop)` of a batch of `total`; values that are not per sample are unchanged.

    Tensors whose first dimension is `total`, and lists of `total` strings or numbers, are per sample.
    """
    return map_samples(batch, total, lambda tensor: tensor[start:stop], lambda items: items[start:stop])


def map_samples(
    batch: Any,
    total: int,
    on_tensor: Callable[[torch.Tensor], torch.Tensor],
    on_list: Callable[[list[Any]], list[Any]],
) -> Any:
    """Apply a function to every per-sample tensor and list of a batch."""

    def is_samples(node: Any) -> bool:
        return (
            isinstance(node, list) and len(node) == total and all(isinstance(item, str | int | float) for item in node)
        )

    def convert(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return on_tensor(node) if node.dim() > 0 and node.shape[0] == total else node
        return on_list(node) if is_samples(node) else node

    return pytree.tree_map(convert, batch, is_leaf=is_samples)
