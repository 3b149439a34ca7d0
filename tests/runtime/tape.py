"""A recorder without a GPU that repeats operators as CUDA graphs do: with the tensors that they had when recorded.

Whatever a record decides in Python, and every tensor that it takes from elsewhere, is that of the record; values that
change in between show only through memory. To read a value is an error, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "equal")
STATISTICS = ("running_mean", "running_var")


class Tape:
    """Records operators; `count` is the number of records, `turns` are their numbers as they were repeated."""

    draws_apart = True

    def __init__(self) -> None:
        self._mode: Operators | None = None
        self.count = 0
        self.turns: list[int] = []

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert self._mode is not None
        with self._mode.paused():
            return torch.zeros(tuple(shape), dtype=dtype)

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        self._mode = Operators()
        state = torch.get_rng_state()
        try:
            with self._mode:
                work()
        finally:
            self._mode.undo()
            torch.set_rng_state(state)
        self.count += 1
        return partial(self._repeat, self.count, self._mode)

    def _repeat(self, number: int, mode: Operators) -> None:
        self.turns.append(number)
        mode.repeat()

    def apart(self) -> Tape:
        return self

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._is_paused = False

    def paused(self) -> Any:
        return Paused(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if any(name in func.name() for name in READS):
            raise RuntimeError("a record may not read values")
        known = {id(tensor) for tensor, _ in self._changed}
        for tensor in self._written(func, args, kwargs):
            if id(tensor) not in known:
                self._changed.append((tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for place, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or argument.name in STATISTICS:
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, before in reversed(self._changed):
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.copy_(before)
        self._changed.clear()

    def repeat(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                if func.is_view:
                    continue
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


class Paused:
    def __init__(self, mode: Operators) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode._is_paused = True

    def __exit__(self, *_: object) -> None:
        self._mode._is_paused = False
