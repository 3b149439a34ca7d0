"""Combines the results of the user's step on micro-batches into that on the mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.runtime.stage import MicroBatch

Outputs = Sequence[tuple[MicroBatch, Any]]


def combined(outputs: Outputs) -> Any:
    """Combine results: join tensors per sample, average single numbers by samples, mappings and sequences by item."""
    sizes = [micro_batch.num_samples for micro_batch, _ in outputs]
    return _combine([value for _, value in outputs], sizes)


def _combine(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if len(values) == 1:
        return _detached(first)
    if isinstance(first, Tensor):
        return _combine_tensors([value.detach() for value in values], sizes)
    if isinstance(first, Mapping):
        return {key: _combine([value[key] for value in values], sizes) for key in first}
    if isinstance(first, list | tuple) and all(len(value) == len(first) for value in values):
        return type(first)(_combine(list(items), sizes) for items in zip(*values, strict=True))
    if isinstance(first, Number) and not isinstance(first, bool):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    return first if all(value is None or value == first for value in values) else values


def _combine_tensors(values: list[Tensor], sizes: list[int]) -> Tensor:
    if all(value.dim() > 0 and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if not values[0].is_floating_point():
        return torch.stack(values)
    return weighted_mean(values, sizes)


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Mean by samples, in the values' dtype, computed in float64."""
    total = sum(value.detach().double() * size for value, size in zip(values, sizes, strict=True))
    assert isinstance(total, Tensor)
    return (total / sum(sizes)).to(values[0].dtype)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


def losses_of(outputs: Outputs) -> list[Tensor]:
    """The losses of the micro-batches."""
    return [value["loss"] if isinstance(value, Mapping) else value for _, value in outputs]


def loss_and_rest(outputs: Outputs) -> tuple[Tensor, dict[str, Any]]:
    """The mini-batch's loss, and the rest of the dict that a training step returned."""
    losses = losses_of(outputs)
    rest = [
        (part, {key: item for key, item in value.items() if key != "loss"})
        for part, value in outputs
        if isinstance(value, Mapping)
    ]
    loss = weighted_mean(losses, [micro_batch.num_samples for micro_batch, _ in outputs])
    return loss, combined(rest) if rest else {}
