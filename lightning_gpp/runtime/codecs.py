"""Codecs: the form in which a tensor travels from one device to another.

A codec knows the form of what travels from the form of the tensor alone, so that the receiver can allocate its buffer
before anything has arrived. Tensors that stay on their device are not encoded.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor


class Form(NamedTuple):
    """Shape and dtype of a tensor, and the dimension that counts samples; None if there is none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = None


def form_of(tensor: Tensor, batch_dim: int | None = None) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype, batch_dim)


class Codec(Protocol):
    """Turns tensors into what travels, and back."""

    def travels(self, form: Form) -> Form:
        """The form in which a tensor of the given form travels."""
        ...

    def encode(self, tensor: Tensor, batch_dim: int | None) -> Tensor:
        """The tensor that travels, of the form `travels` says."""
        ...

    def decode(self, received: Tensor, form: Form) -> Tensor:
        """A tensor of the given form, from the one that travelled."""
        ...


class Exact:
    """Tensors travel as they are."""

    def travels(self, form: Form) -> Form:
        return form

    def encode(self, tensor: Tensor, batch_dim: int | None) -> Tensor:
        return tensor

    def decode(self, received: Tensor, form: Form) -> Tensor:
        return received


class EightBit:
    """Floating-point numbers travel as 8-bit integers between the smallest and the largest of their sample.

    A row of bytes per sample: the smallest and the largest finite value, then one code per number. Codes 0 to LEVELS
    divide the range evenly, so no finite number changes by more than range / (2 LEVELS), and the ends of the range do
    not change; the codes above are infinite and undefined numbers. A sample is encoded without knowledge of others, so
    results do not depend on micro-batches or replicas. A tensor without a batch dimension is one row. Tensors of other
    types, and those that would not get shorter, travel as they are.
    """

    LEVELS: Final = 252
    INFINITE, MINUS_INFINITE, UNDEFINED = 253, 254, 255

    def travels(self, form: Form) -> Form:
        if not self._shortens(form):
            return form
        count, length = _rows(form)
        return Form((count, _ends_bytes(form.dtype) + length), torch.uint8, 0)

    def encode(self, tensor: Tensor, batch_dim: int | None) -> Tensor:
        form = form_of(tensor, batch_dim)
        if not self._shortens(form):
            return tensor
        first = tensor if batch_dim is None else tensor.movedim(batch_dim, 0)
        rows = first.reshape(_rows(form)).to(_wide(form.dtype))
        ends = _finite_ends(rows)
        return torch.cat([ends.view(torch.uint8), self._codes(rows, ends)], dim=1)

    def decode(self, received: Tensor, form: Form) -> Tensor:
        if not self._shortens(form):
            return received
        split = _ends_bytes(form.dtype)
        ends = received[:, :split].clone(memory_format=torch.contiguous_format).view(_wide(form.dtype))
        rows = self._values(received[:, split:], ends).to(form.dtype)
        if form.batch_dim is None:
            return rows.reshape(form.shape)
        others = [size for dim, size in enumerate(form.shape) if dim != form.batch_dim]
        return rows.reshape(-1, *others).movedim(0, form.batch_dim).contiguous()

    def _codes(self, rows: Tensor, ends: Tensor) -> Tensor:
        half, low, span = rows / 2, ends[:, :1] / 2, ends[:, 1:] / 2 - ends[:, :1] / 2  # the whole span may overflow
        codes = ((half - low) / span.where(span > 0, 1) * self.LEVELS).round().clamp(0, self.LEVELS)
        codes = codes.masked_fill(rows.isposinf(), self.INFINITE).masked_fill(rows.isneginf(), self.MINUS_INFINITE)
        return codes.masked_fill(rows.isnan(), self.UNDEFINED).to(torch.uint8)

    def _values(self, codes: Tensor, ends: Tensor) -> Tensor:
        low, high = ends[:, :1], ends[:, 1:]
        part = codes / self.LEVELS
        values = low * (1 - part) + high * part  # exact at both ends, unlike low + code * step
        values = values.masked_fill(codes == self.INFINITE, torch.inf)
        values = values.masked_fill(codes == self.MINUS_INFINITE, -torch.inf)
        return values.masked_fill(codes == self.UNDEFINED, torch.nan)

    def _shortens(self, form: Form) -> bool:
        if not form.dtype.is_floating_point:
            return False
        _, length = _rows(form)
        return _ends_bytes(form.dtype) + length < length * form.dtype.itemsize


EXACT: Final = Exact()
EIGHT_BIT: Final = EightBit()


def _rows(form: Form) -> tuple[int, int]:
    """Number of rows, and of numbers in each."""
    length = 1
    for dim, size in enumerate(form.shape):
        length *= 1 if dim == form.batch_dim else size
    return 1 if form.batch_dim is None else form.shape[form.batch_dim], length


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of the ends of a row."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _ends_bytes(dtype: torch.dtype) -> int:
    return 2 * _wide(dtype).itemsize


def _finite_ends(rows: Tensor) -> Tensor:
    """The smallest and the largest finite number of every row: (rows, 2); zeros if there is none."""
    finite = rows.isfinite()
    low, high = rows.masked_fill(~finite, torch.inf).amin(1), rows.masked_fill(~finite, -torch.inf).amax(1)
    return torch.stack([low, high], dim=1).masked_fill(~finite.any(1, keepdim=True), 0)
