"""Norms of the gradients of all stages, for hooks that combine them: a norm of all, clipping by hand, logs of each.

Hooks run on every rank, each on what it holds. Before one that may look at gradients the ranks exchange a few norms of
each. Inside, the gradient of a parameter of another rank has no values, but its norm is known, and real:

    norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]     every rank: those of all stages
    nn.utils.clip_grad_norm_(self.parameters(), 1.0)                             every rank: scales its own, alike
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp.training.control import Control

ORDERS: Final = (1.0, 2.0, math.inf)
"""The orders of the norms that are exchanged."""
_MISSING, _KNOWN, _UNKNOWN = 0.0, 1.0, 2.0
"""The first number of a row: a parameter has no gradient, one whose norms are known, or one whose norms are not."""
_NO_ROW: Final[list[Any]] = [_MISSING, *(0.0 for _ in ORDERS)]


class KnownNorms:
    """The norms of gradients by parameter name, as far as they are known.

    Args:
        table: a row for each parameter: whether it has a gradient, and its norms of `ORDERS`.
    """

    def __init__(self, table: Mapping[str, list[float]]) -> None:
        self._table = {name: list(row) for name, row in table.items()}

    def is_missing(self, name: str) -> bool:
        """True if the parameter is known to have no gradient."""
        return name in self._table and self._table[name][0] == _MISSING

    def norm(self, name: str, order: float) -> float | None:
        """A norm of a gradient; None if it is not known."""
        known, *norms = self._table.get(name, [_UNKNOWN])
        return norms[ORDERS.index(order)] if known == _KNOWN and order in ORDERS else None

    def forget(self, name: str) -> None:
        """Take note that a gradient was changed."""
        self._table[name] = [_UNKNOWN, *(0.0 for _ in ORDERS)]


_current: ContextVar[KnownNorms | None] = ContextVar("norms", default=None)


def current() -> KnownNorms | None:
    """The norms that are known in the present hook."""
    return _current.get()


@contextmanager
def known(norms: KnownNorms) -> Iterator[None]:
    """Inside, a hook runs, and these norms are known."""
    token = _current.set(norms)
    try:
        yield
    finally:
        _current.reset(token)


def exchanged(module: nn.Module, mine: Collection[str], control: Control) -> KnownNorms:
    """The norms of the gradients of all stages. All ranks of a pipeline call this together.

    `mine`: the parameters for which this rank speaks; of each, one rank does.
    """
    named = dict(module.named_parameters())
    rows = [_row(parameter.grad) if name in mine else _NO_ROW for name, parameter in named.items()]
    measured = [value for row in rows for value in row if isinstance(value, Tensor)]
    values = iter(torch.stack(measured).tolist() if measured else ())  # one wait for the device
    numbers = torch.tensor(
        [[next(values) if isinstance(value, Tensor) else value for value in row] for row in rows], dtype=torch.float64
    )
    if (work := control.sum_later(numbers)) is not None:
        work.wait()
    return KnownNorms(dict(zip(named, numbers.tolist(), strict=True)))


def _row(gradient: Tensor | None) -> list[Any]:
    if gradient is None:
        return _NO_ROW
    if gradient.layout is not torch.strided or gradient.is_complex():
        return [_UNKNOWN, *_NO_ROW[1:]]
    return [_KNOWN, *(torch.linalg.vector_norm(gradient.detach(), order).double() for order in ORDERS)]


def order_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The order of the norm that `linalg_vector_norm` computes; None if it is not a norm of the whole tensor."""
    given = dict(zip(("tensor", "ord", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    dims = given.get("dim")
    if given.get("keepdim") or (dims is not None and len(dims) < given["tensor"].dim()):
        return None
    return float(given.get("ord", 2.0))
