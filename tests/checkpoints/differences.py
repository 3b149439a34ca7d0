"""Compares checkpoints to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """The places at which two trees differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{place}: {one} != {other}"
    elif isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            yield f"{place}: {list(one)} != {list(other)}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{place}.{number}")
    elif one != other:
        yield f"{place}: {one} != {other}"
