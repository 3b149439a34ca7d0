"""Random numbers of a run on all samples, of which a run on some of them gets the share of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp._compat.torch import TorchDispatchMode

_OF_ALL_SAMPLES: Final = ("randperm", "multinomial")


class NoShare(Exception):
    """Some samples have no share in a draw, because it mixes them."""


class Draws(TorchDispatchMode):
    """Records the draws of a first run; inside `share` runs on some of its samples repeat them.

    Args:
        total: samples of the first run.
    """

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total, self._tape = total, list[Tensor]()
        self._share: slice | None = None
        self._next = 0

    @contextmanager
    def share(self, start: int, stop: int) -> Iterator[None]:
        """Inside, draws are those of samples `[start, stop)`."""
        self._share, self._next = slice(start, stop), 0
        try:
            yield
        finally:
            self._share = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if any(name in func.name() for name in _OF_ALL_SAMPLES):
            raise NoShare
        if self._share is None:
            self._tape.append(result.clone())
        else:
            result.copy_(self._repeated(result, self._share))
        return result

    def _repeated(self, result: Tensor, share: slice) -> Tensor:
        if self._next == len(self._tape):
            raise NoShare
        drawn, self._next = self._tape[self._next], self._next + 1
        if drawn.shape == result.shape:
            return drawn
        if drawn.dim() == 0 or drawn.shape[0] != self._total or drawn[share].shape != result.shape:
            raise NoShare
        return drawn[share]
