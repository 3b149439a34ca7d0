"""Cutting of mini-batches along their samples: tensors along the first dimension, lists of samples by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    Per sample are tensors whose first dimension is `total`, and lists and tuples inside the batch with `total` entries:
    strings and numbers, mappings, sequences of numbers, or tensors of which none has `total` as its first dimension.
    """
    return map_samples(batch, total, lambda tensor: tensor[start:stop], lambda items: items[start:stop])


def map_samples(
    batch: Any,
    total: int,
    on_tensor: Callable[[torch.Tensor], torch.Tensor],
    on_list: Callable[[Any], Any],
) -> Any:
    """Apply a function to every per-sample tensor, and one to every per-sample list or tuple, of a batch."""

    def is_samples(node: Any) -> bool:
        return node is not batch and _is_list_of_samples(node, total)

    def convert(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return on_tensor(node) if _counts_samples(node, total) else node
        return on_list(node) if is_samples(node) else node

    return pytree.tree_map(convert, batch, is_leaf=is_samples)


def cut_of(batch: Any) -> tuple[list[str], list[str]]:
    """The parts of a batch that are cut into micro-batches, and those that every micro-batch gets, with their sizes."""
    total = batch_size_of(batch)
    is_samples = lambda node: node is not batch and _is_list_of_samples(node, total)  # noqa: E731
    cut, passed = list[str](), list[str]()
    for path, leaf in pytree.tree_leaves_with_path(batch, is_leaf=is_samples):
        name = pytree.keystr(path) or "the batch"
        if isinstance(leaf, torch.Tensor):
            (cut if _counts_samples(leaf, total) else passed).append(f"{name} {tuple(leaf.shape)}")
        elif is_samples(leaf):  # type: ignore[no-untyped-call]
            cut.append(f"{name} ({type(leaf).__name__} of {total})")
        elif leaf is not None:
            passed.append(f"{name} ({type(leaf).__name__})")
    return cut, passed


def _counts_samples(tensor: torch.Tensor, total: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == total


def _is_list_of_samples(node: Any, total: int) -> bool:
    if type(node) not in (list, tuple) or len(node) != total or total == 0:
        return False
    if all(isinstance(item, torch.Tensor) for item in node):
        return not any(_counts_samples(item, total) for item in node)
    return all(isinstance(item, str | int | float | Mapping) or _is_plain_sequence(item) for item in node)


def _is_plain_sequence(node: Any) -> bool:
    return type(node) in (list, tuple) and all(isinstance(item, str | int | float) for item in node)
