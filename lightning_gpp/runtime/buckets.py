"""Buckets: gradients that are all-reduced as one flat tensor; buckets start strictly in one order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_gpp.errors import GPPError


def parts(named: Mapping[str, Parameter], num_bytes: int) -> Iterator[dict[str, Parameter]]:
    """Consecutive parameters, as many as fit into `num_bytes`, but at least one."""
    part: dict[str, Parameter] = {}
    size = 0
    for name, parameter in named.items():
        if part and size + parameter.nbytes > num_bytes:
            yield part
            part, size = {}, 0
        part[name] = parameter
        size += parameter.nbytes
    if part:
        yield part


class Bucket:
    """Gradients that travel as one flat tensor: a flag for each that there is one, then their elements."""

    def __init__(self, named: Mapping[str, Parameter], group: dist.ProcessGroup) -> None:
        self.named = dict(named)
        self._group = group
        self._flat = torch.empty(0)
        self._work: dist.Work | None = None

    @property
    def started(self) -> bool:
        """True if the all-reduce has started; additions to gradients would be lost now."""
        return self._work is not None

    def start(self) -> None:
        """Start the all-reduce of a copy of the gradients.

        Raises:
            GPPError: a gradient is sparse.
        """
        self._flat = torch.cat([self._flags(), *(self._elements(name) for name in self.named)])
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums, and replace the gradients by them."""
        if self._work is None:
            return
        self._work.wait()
        flags, *sums = torch.split(self._flat, [len(self.named), *(p.numel() for p in self.named.values())])
        missing = any(parameter.grad is None for parameter in self.named.values())
        found = flags.tolist() if missing else [1.0] * len(sums)  # reading the flags waits for the device
        for parameter, total, flag in zip(self.named.values(), sums, found, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif flag:
                parameter.grad = total.view_as(parameter).clone()
        self._flat, self._work = torch.empty(0), None

    def _flags(self) -> Tensor:
        present = [float(parameter.grad is not None) for parameter in self.named.values()]
        first = next(iter(self.named.values()))
        return torch.tensor(present, dtype=first.dtype).to(first.device, non_blocking=True)

    def _elements(self, name: str) -> Tensor:
        grad = self.named[name].grad
        if grad is None:
            return torch.zeros_like(self.named[name], memory_format=torch.contiguous_format).detach().flatten()
        if grad.is_sparse:
            raise GPPError(
                f"Parameter {name!r} has a sparse gradient and is held by several ranks, which can only sum dense "
                "ones. Use `sparse=False` for its embedding, or give its stage a single device."
            )
        return grad.flatten()


class BucketQueue:
    """Buckets of one stage. They start one after the other, in the given order, whenever their gradients come.

    Ranks may compute gradients in different orders, or not at all; collectives match by order alone.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._missing = [set[int]() for _ in self.buckets]
        self._places = {id(p): (n, name) for n, bucket in enumerate(buckets) for name, p in bucket.named.items()}
        self._hooks: list[RemovableHandle] = []
        self._next = 0

    def arm(self) -> None:
        """The next backward is the last one: start every bucket as soon as it and those before it are complete."""
        if self._hooks or self._next:
            return
        trained = [[p for p in bucket.named.values() if p.requires_grad] for bucket in self.buckets]
        self._missing = [set(map(id, parameters)) for parameters in trained]
        parameters = [parameter for of_bucket in trained for parameter in of_bucket]
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]

    def start(self) -> None:
        """Start all buckets that have not started; gradients that have not come by now count as missing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._next < len(self.buckets):
            self._start_next()

    def finish(self) -> None:
        """Start the rest, wait for all, and prepare for the next step."""
        self.start()
        for bucket in self.buckets:
            bucket.finish()
        self._next = 0

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1

    def _arrived(self, parameter: Tensor) -> None:
        number, name = self._places[id(parameter)]
        if self.buckets[number].started:
            raise GPPError(
                f"Parameter {name!r} received a second gradient in the last backward of its stage, after the first one "
                "was sent to the other replicas. Re-entrant activation checkpointing of a module that is used twice "
                "does this; use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        self._missing[number].discard(id(parameter))
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._start_next()
