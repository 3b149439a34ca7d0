"""Checks what a step logs: single numbers, metrics, and dictionaries of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

from torch import Tensor
from torchmetrics import Metric


def unloggable(arguments: tuple[Any, ...], given: Mapping[str, Any]) -> str:
    """The reason why a call of `log` or `log_dict` fails by its values; empty if it does not."""
    named = dict(zip(("name", "value"), arguments, strict=False)) | dict(given)
    logged = named.get("dictionary", named.get("name")) if "value" not in named else {named.get("name"): named["value"]}
    return next(_wrong(logged), "") if isinstance(logged, Mapping) else ""


def _wrong(logged: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in logged.items():
        if isinstance(value, Mapping):
            yield from _wrong(value)
        elif not isinstance(value, Tensor | Number | Metric):
            yield f"it logs {name!r}, a {type(value).__name__}, and not a number, a tensor or a metric"
