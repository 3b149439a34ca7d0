"""Gradients over ranks: summed if several ranks hold a parameter, counted once in a norm.

Gradients are sums over samples, weighted by the loss. So one sum over all ranks that hold a parameter serves tied
weights, stage replicas and pipeline replicas alike. The all-reduce of a stage's gradients starts after its last
backward, or bucket by bucket during that backward; that of parameters that several stages use starts at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.runtime.mesh import Mesh


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
                "ones. Use `sparse=False` for its embedding."
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


Holders = tuple[int, ...]
"""Global ranks that hold a parameter, in ascending order."""

BUCKET_BYTES: Final = 25 * 2**20
"""The most bytes of one all-reduce, unless one parameter is larger; torch's DDP found it a good size."""

SHARED: Final = -1
"""Represents, in place of a stage, parameters that several stages or none use."""


class GradientSync:
    """Sums gradients over the ranks that hold each parameter. All ranks construct it together.

    It is the `StageSync` of replicas with unsharded parameters.

    Args:
        parameters: this rank's parameters, by canonical name; those that are not trained are ignored.
        holders: global ranks that hold each parameter of the model; the same on all ranks. Buckets are filled from the
            end, so that with parameters in the order of their registration those that get their gradients first travel
            first.
        mesh: the mesh of the ranks.
        stages: stages that use each parameter, the same on all ranks; without it every all-reduce waits for `sync`.
        parted: parameters of which every member of a device has a part; the others have all of them.
        frozen_since: parameters that were trained in an earlier mini-batch of this optimizer step, and no longer are;
            the same on all ranks.
        device: the device of this rank, which may have no parameters; by default the CPU.

    Attributes:
        last: whether an optimizer step follows this mini-batch; set it before each. If not, gradients are only
            accumulated.
        reduces: whether this rank holds parameters that others hold, too.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        holders: Mapping[str, Sequence[int]],
        mesh: Mesh,
        *,
        stages: Mapping[str, Sequence[int]] | None = None,
        parted: Collection[str] = (),
        frozen_since: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        self._holders = {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
        self._parameters = dict(parameters)
        self._mesh, self._parted, self._frozen_since = mesh, frozenset(parted), frozenset(frozen_since)
        self._device = device or torch.device("cpu")
        self.gathers, self.last = False, True
        stage_of = {name: used[0] for name, used in (stages or {}).items() if len(used) == 1}
        self._stage_of = {name: stage_of.get(name, SHARED) for name in reversed(self._holders)}
        groups = mesh.groups("gradients", (ranks for ranks in self._holders.values() if len(ranks) > 1))
        # From the last stage to the first, like backwards; the same on all ranks.
        here = sorted({self._stage_of[name] for name in self._parameters}, reverse=True)
        buckets = {stage: list(self._buckets(stage, groups)) for stage in here}
        self._queues = {stage: BucketQueue(of_stage) for stage, of_stage in buckets.items() if of_stage}
        self.reduces = bool(self._queues)

    def arm(self, stage: int) -> None:
        """Announce that the next backward of the stage is its last one; all-reduces may start while it runs."""
        if self.last and stage in self._queues:
            self._queues[stage].arm()

    def reduce(self, stage: int) -> None:
        """Start the all-reduces of the stage's gradients, after its backwards. `sync` waits for them.

        Raises:
            GPPError: a gradient is sparse.
        """
        if self.last and stage in self._queues:
            self._queues[stage].start()

    def unshard(self, stage: int) -> None:
        """Do nothing: parameters are unsharded."""

    def ready(self, stage: int) -> None:
        """Do nothing: parameters are unsharded."""

    def reshard(self, stage: int) -> None:
        """Do nothing: parameters stay unsharded."""

    def sync(self) -> None:
        """Replace every gradient by its sum over the holders; None counts as zero, and stays None if all have None.

        Raises:
            GPPError: a gradient is sparse.
        """
        for queue in self._queues.values():
            queue.start()
        for queue in self._queues.values():
            queue.finish()

    def grad_norm(self, norm_type: float = 2.0, names: Collection[str] | None = None) -> Tensor:
        """The norm of all gradients of the pipeline as one vector, with each parameter counted once. Call `sync` first.

        All ranks of the pipeline must call this; all get the same float64 number.

        Args:
            norm_type: p of the p-norm, above 0; may be infinite.
            names: the parameters that count; None for all.

        Raises:
            ConfigError: `norm_type` is not above 0.
        """
        pipeline = set(self._mesh.pipeline_ranks())
        counted = self.counted_on(pipeline, names)
        return norm_over_ranks(counted, norm_type, self._device, self._mesh.pipeline_group)

    def counted_on(self, ranks: set[int], names: Collection[str] | None = None) -> Iterator[Tensor]:
        """Gradients of the parameters, or of some of them, whose first holder among these ranks is this one."""
        wanted = None if names is None else set(names)
        for name, parameter in self._parameters.items():
            if wanted is not None and name not in wanted:
                continue
            first = min(rank for rank in self._holders[name] if rank in ranks)
            counts = self._mesh.member == 0 or name in self._parted
            if first == self._mesh.rank and counts and parameter.grad is not None:
                yield parameter.grad

    def _buckets(self, stage: int, groups: Mapping[Holders, dist.ProcessGroup]) -> Iterator[Bucket]:
        """Parameters of the same stage, holders and dtype, in parts of at most BUCKET_BYTES."""
        of_stage = [name for name, known in self._stage_of.items() if known == stage and name in self._parameters]
        since = self._frozen_since
        trained = [name for name in of_stage if self._parameters[name].requires_grad or name in since]
        for ranks in sorted(groups):
            named = {name: self._parameters[name] for name in trained if self._holders[name] == ranks}
            for dtype in sorted({parameter.dtype for parameter in named.values()}, key=str):
                same = {name: parameter for name, parameter in named.items() if parameter.dtype == dtype}
                yield from (Bucket(part, groups[ranks]) for part in parts(same, BUCKET_BYTES))


def norm_over_ranks(
    parts: Iterable[Tensor], norm_type: float, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """The p-norm as a float64 number that is the same on all ranks of `group` (None: all ranks).

    Args:
        parts: this rank's part of the vector, every element on one rank only.
        norm_type: p, above 0; may be infinite.
        device: device for the sum.
        group: ranks that call this together.

    Raises:
        ConfigError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise ConfigError(f"The norm for gradient clipping is {norm_type}; use a number above 0, or infinity.")
    real = [part.abs() if part.is_complex() else part for part in parts if part.numel()]
    norms = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in real]
    result = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        result = result.max()
        dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
        return result
    result = result.pow(norm_type).sum()
    dist.all_reduce(result, group=group)
    return result.pow(1 / norm_type)
