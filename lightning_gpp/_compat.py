"""Every private name of torch and Lightning that this library uses, each with the reason, so that an upgrade has one
place to look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # torch.export stands on it; no public name yet
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# --- torch: recording ---


@contextmanager
def checkpoint_regions(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Announce every activation-checkpointed region; inside the context regions run without checkpointing."""
    plain = (_checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    def non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    _checkpoint.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]
    _checkpoint._checkpoint_without_reentrant_generator = non_reentrant  # type: ignore[assignment]
    try:
        yield
    finally:
        _checkpoint.CheckpointFunction, _checkpoint._checkpoint_without_reentrant_generator = plain  # type: ignore[misc]


@contextmanager
def autograd_function_calls(handler: Callable[..., Any]) -> Iterator[None]:
    """Route `SomeFunction.apply(...)` of custom autograd functions through `handler(cls, plain_apply, args, kwargs)`."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return handler(cls, functools.partial(plain.__func__, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
