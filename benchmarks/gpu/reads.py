"""Counts what makes a process wait in a step: reads of tensors' values, and messages of the side channel.

Reading a value of a tensor on a GPU (`.item()`, `bool(tensor)`, `.tolist()`) waits for all the work queued before. On
CPUs nothing waits, but the reads are the same, so they can be counted there. On GPUs `torch.cuda.set_sync_debug_mode`
also tells of others (see `synchronising`).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_gpp

PACKAGE = Path(lightning_gpp.__file__).parent
MESSAGES = ("isend", "recv", "send", "irecv", "all_reduce", "broadcast", "barrier", "all_gather", "gather")
_LISTS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


@dataclass(slots=True)
class Counts:
    """Numbers of reads and messages, by the place in the package that they come from."""

    reads: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)


@contextmanager
def counted() -> Iterator[Counts]:
    """Count reads of floating-point tensors, and calls of `torch.distributed`, on this thread.

    Numbers of the side channel are integers on the CPU, which nobody waits for. Values of the stages do not go through
    the functions of `torch.distributed`, but through its process groups.
    """
    counts = Counts()
    with ExitStack() as stack:
        for name in MESSAGES:
            stack.enter_context(mock.patch.object(dist, name, _noted(getattr(dist, name), counts.messages)))
        stack.enter_context(_Scalars(counts.reads))
        stack.enter_context(_Arrays(counts.reads))
        yield counts


class _Scalars(TorchDispatchMode):
    """Notes the operator behind `.item()`, `float(tensor)`, `bool(tensor)` and comparisons in conditions."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _matters(args[0]):
            self._reads[place()] += 1
        return func(*args, **(kwargs or {}))


class _Arrays(TorchFunctionMode):
    """Notes reads of all elements, which are no operators, and copies that wait: of Python numbers to a device."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LISTS and _matters(args[0]):
            self._reads[place()] += 1
        if func is torch.tensor and kwargs.get("device") is not None:
            self._reads[f"{place()} (waits to copy to the device)"] += 1
        return func(*args, **kwargs)


def _matters(tensor: Tensor) -> bool:
    """True for tensors that stages compute: of floating-point type, or, as comparisons are, of truth values."""
    return tensor.is_floating_point() or tensor.dtype is torch.bool


def _noted(function: Callable[..., Any], counter: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        counter[f"{function.__name__} in {place()}"] += 1
        return function(*args, **kwargs)

    return run


@contextmanager
def synchronising() -> Iterator[Counter[str]]:
    """Count the operations inside that make the host wait for a CUDA device, by place."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: found.update([place()] * _is_sync(message))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _is_sync(message: Warning | str) -> bool:
    return re.search("synchronizing CUDA operation", str(message)) is not None


def place() -> str:
    """The innermost function of this package or of Lightning that runs now, with its file.

    The side channel itself does not count, but what uses it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and file.name != "control.py":
            return f"{file.relative_to(PACKAGE)}: {frame.f_code.co_name}"
        if "optim" in file.parts:
            return f"torch.optim: {frame.f_code.co_name}"
        if "lightning" in file.parts:
            return f"Lightning, {file.name}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
