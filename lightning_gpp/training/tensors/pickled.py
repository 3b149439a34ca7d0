"""Objects as bytes for other ranks, with tensors of the types that pickle writes, but does not read."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, Final

import torch
from torch import Tensor

UNREADABLE: Final = frozenset({torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2})
"""Types of tensors whose pickles torch 2.13 does not read."""


def pickled(value: Any) -> bytes:
    """The pickle of an object; tensors of unreadable types go as bytes."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
    pickler.dump(value)
    return content.getvalue()


def _reduced(tensor: Tensor) -> Any:
    if tensor.dtype not in UNREADABLE or tensor.is_meta:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return _rebuilt, (raw, tensor.dtype, tensor.shape)


def _rebuilt(raw: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return raw.view(dtype).view(shape)
