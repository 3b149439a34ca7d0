"""Counts the bytes of live tensors on devices whose allocator does not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, every result of an operator counts until its memory is freed.

    Args:
        tensors: those that exist before.

    Attributes:
        now: bytes at present.
        peak: the most so far.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._add(leaf)
        return result

    def _add(self, tensor: Any) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:  # others have no memory here
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
