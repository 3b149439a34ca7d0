"""Functions that modules use so that a model can be cut along its sequence (`strategy.slices`).

    def forward(self, text):
        x = self.tokens(text) + self.places(positions(text))

    def forward(self, x):  # of the attention
        query, key, value = ...  # [batch, heads, tokens, features]
        mixed = causal_attention(query, key, value)

In a module that computes all tokens at once, `carry` returns its argument, `positions` counts from 0 and
`causal_attention` is that of torch. In a slice, the tokens of earlier slices are put in front, and gradients flow back
into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from lightning_gpp.errors import GPPError
from lightning_gpp.slices import CARRY


class _Extended(torch.autograd.Function):
    """Writes a tensor behind that of the earlier tokens, into memory that all slices of a sequence share.

    To autograd, every slice has a tensor of its own: no slice reads what a later one writes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, earlier: Tensor | None, dim: int, total: int) -> Tensor:
        ctx.dim, ctx.start = dim, 0 if earlier is None else earlier.size(dim)
        shape = list(tensor.shape)
        shape[dim] = total
        whole = tensor.new_empty(shape) if earlier is None else _alias(earlier, shape)
        whole.narrow(dim, ctx.start, tensor.size(dim)).copy_(tensor)
        shape[dim] = ctx.start + tensor.size(dim)
        return _alias(whole, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gradient, dim, start = gradients[0], ctx.dim, ctx.start
        own = gradient.narrow(dim, start, gradient.size(dim) - start)
        return own, gradient.narrow(dim, 0, start) if start else None, None, None


def _alias(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Another tensor on the same memory, with the same offset and strides."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())


class _Slice:
    """The slice that this process computes.

    Attributes:
        start: its first token.
        total: number of tokens of the sequence.
        earlier: tensors that the previous slice kept, in the order of the calls of `carry`; empty for the first slice.
        kept: tensors for the next slice.
    """

    def __init__(self, start: int, total: int, earlier: Sequence[Tensor]) -> None:
        self.start, self.total, self.earlier = start, total, list(earlier)
        self.kept: list[Tensor] = []

    def extended(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor, with what the previous slice kept at this call of `carry` in front."""
        earlier = self.earlier[len(self.kept)] if self.start else None
        extended: Tensor = _Extended.apply(tensor, earlier, dim % tensor.dim(), self.total)  # type: ignore[no-untyped-call]
        self.kept.append(extended)
        return extended


_current: _Slice | None = None
"""The current slice; a process computes one at a time."""


def carry(tensor: Tensor, dim: int = 1) -> Tensor:
    """Put the tensor of all earlier tokens in front. Use it for tensors that later tokens need, such as keys and
    values.

    Args:
        tensor: values of the tokens that are computed.
        dim: the dimension that counts tokens.

    Returns:
        `[..., earlier + tokens, ...]` in a slice; otherwise the tensor itself.
    """
    return _carrier(dim)(tensor)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of every token to itself and all earlier tokens, those of earlier slices included.

    Args:
        query: `[..., tokens, features]`, of the tokens that are computed.
        key: the same.
        value: the same.
        dropout_p: see `torch.nn.functional.scaled_dot_product_attention`.
        scale: see there.
    """
    return _attend(query, carry(key, -2), carry(value, -2), dropout_p, scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None) -> Tensor:
    if has_torch_function((query, key, value)):
        found: Tensor = handle_torch_function(_attend, (query, key, value), query, key, value, dropout_p, scale)
        return found
    count, total = query.size(-2), key.size(-2)
    if count == total:
        return scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal=True, scale=scale)
    mask = _mask(count, total, query.dtype, query.device)
    return scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale)


_attend.__name__ = "causal_attention"


@functools.lru_cache(maxsize=64)
def _mask(count: int, total: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a token may look, -inf elsewhere. Cached: autograd would keep one for each layer and micro-batch."""
    with torch.inference_mode(False):
        return torch.full((count, total), float("-inf"), dtype=dtype, device=device).triu(total - count + 1)


def positions(tensor: Tensor, dim: int = 1) -> Tensor:
    """Positions in the sequence of the tokens along dimension `dim` of a tensor: `[tokens]` int64."""
    if has_torch_function_unary(tensor):
        found: Tensor = handle_torch_function(positions, (tensor,), tensor, dim)
        return found
    start = 0 if _current is None else _current.start
    return torch.arange(start, start + tensor.size(dim), device=tensor.device)


@contextmanager
def computing(start: int, total: int, earlier: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Inside, modules compute the slice from token `start` of `total`; yields the list of tensors carried on."""
    global _current
    if _current is not None:
        raise GPPError("A slice was started inside another one.")
    _current = part = _Slice(start, total, earlier)
    try:
        yield part.kept
    finally:
        _current = None


@functools.cache
def _carrier(dim: int) -> Callable[[Tensor], Tensor]:
    """`carry` for one dimension, under a name that a capture of the model shows."""

    def carrier(tensor: Tensor) -> Tensor:
        if has_torch_function_unary(tensor):
            carried: Tensor = handle_torch_function(carrier, (tensor,), tensor)
            return carried
        return tensor if _current is None else _current.extended(tensor, dim)

    carrier.__name__ = f"{CARRY}{dim}"
    return carrier
