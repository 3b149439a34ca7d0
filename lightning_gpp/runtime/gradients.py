"""Gradients over ranks: summed where several ranks hold a parameter, counted once in a norm.

Gradients are sums over samples, weighted by the loss. So one sum over all ranks that hold a parameter serves tied
weights, stage replicas and pipeline replicas alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.runtime.mesh import Mesh

Holders = tuple[int, ...]
"""Global ranks that hold a parameter, in ascending order."""

BUCKET_BYTES: Final = 25 * 2**20
"""One all-reduce moves at most this much, unless one parameter is larger: torch's DDP found it a good size."""


class GradientSync:
    """Sums gradients over the ranks that hold each parameter. All ranks construct it together.

    Args:
        parameters: this rank's own, by canonical name; those that do not require grad are left alone.
        holders: for every parameter of the model the global ranks that hold it; the same on all ranks.
        mesh: the ranks.

    Raises:
        GPPError: `holders` disagrees with `parameters`.
    """

    def __init__(self, parameters: Mapping[str, Parameter], holders: Mapping[str, Sequence[int]], mesh: Mesh) -> None:
        self._holders = {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._mesh = mesh
        self._check()
        groups = mesh.new_groups(ranks for ranks in self._holders.values() if len(ranks) > 1)
        self._buckets = [_Bucket(named, groups[ranks]) for ranks, named in self._bucketed(groups)]

    def sync(self) -> None:
        """Replace every gradient by its sum over the holders; None counts as zero, and stays None where all have None.

        Raises:
            GPPError: a gradient is sparse.
        """
        works = [bucket.start() for bucket in self._buckets]
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            bucket.finish()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the pipeline as one vector, each parameter counted once. Call `sync` before.

        All ranks of the pipeline must call this; all get the same float64 number.

        Args:
            norm_type: p of the p-norm, above 0; may be infinite.

        Raises:
            ConfigError: `norm_type` is not above 0.
        """
        if not norm_type > 0:
            raise ConfigError(f"The norm for gradient clipping is {norm_type}; use a number above 0, or infinity.")
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in self._counted_here()]
        result = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=self._device())
        if math.isinf(norm_type):
            result = result.max()
            dist.all_reduce(result, dist.ReduceOp.MAX, group=self._mesh.pipeline_group)
            return result
        result = result.pow(norm_type).sum()
        dist.all_reduce(result, group=self._mesh.pipeline_group)
        return result.pow(1 / norm_type)

    def _counted_here(self) -> Iterator[Tensor]:
        """Gradients of the parameters whose first holder in this pipeline is this rank."""
        pipeline = set(self._mesh.pipeline_ranks())
        for name, parameter in self._parameters.items():
            first = min(rank for rank in self._holders[name] if rank in pipeline)
            if first == self._mesh.rank and parameter.grad is not None:
                yield parameter.grad

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))

    def _check(self) -> None:
        rank = self._mesh.rank
        held = {name for name, ranks in self._holders.items() if rank in ranks}
        if held != set(self._parameters):
            raise GPPError(
                f"Rank {rank} has the parameters {sorted(self._parameters)}, but is listed as a holder of "
                f"{sorted(held)}: every parameter of a stage must be listed, under one name, on all ranks."
            )

    def _bucketed(self, groups: Mapping[Holders, object]) -> Iterator[tuple[Holders, dict[str, Parameter]]]:
        """Parameters of the same holders and dtype, in sorted order, in parts of at most BUCKET_BYTES."""
        for ranks in sorted(groups):
            named = {n: p for n, p in self._parameters.items() if self._holders[n] == ranks and p.requires_grad}
            for dtype in sorted({p.dtype for p in named.values()}, key=str):
                same = {name: p for name, p in named.items() if p.dtype == dtype}
                yield from ((ranks, part) for part in _parts(same))


def _parts(named: Mapping[str, Parameter]) -> Iterator[dict[str, Parameter]]:
    part: dict[str, Parameter] = {}
    size = 0
    for name, parameter in named.items():
        if part and size + parameter.nbytes > BUCKET_BYTES:
            yield part
            part, size = {}, 0
        part[name] = parameter
        size += parameter.nbytes
    if part:
        yield part


class _Bucket:
    """Gradients that travel as one flat tensor: for each a flag "there is one", then their elements."""

    def __init__(self, named: Mapping[str, Parameter], group: dist.ProcessGroup) -> None:
        self._named = dict(named)
        self._group = group
        self._flat = torch.empty(0)

    def start(self) -> dist.Work:
        self._flat = torch.cat([self._flags(), *(self._elements(name) for name in self._named)])
        work: dist.Work = dist.all_reduce(self._flat, group=self._group, async_op=True)
        return work

    def finish(self) -> None:
        flags, *grads = torch.split(self._flat, [len(self._named), *(p.numel() for p in self._named.values())])
        for parameter, grad, flag in zip(self._named.values(), grads, flags.tolist(), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(grad.view_as(parameter))
            elif flag:
                parameter.grad = grad.view_as(parameter).clone()
        self._flat = torch.empty(0)

    def _flags(self) -> Tensor:
        present = [float(parameter.grad is not None) for parameter in self._named.values()]
        first = next(iter(self._named.values()))
        return torch.tensor(present, dtype=first.dtype, device=first.device)

    def _elements(self, name: str) -> Tensor:
        grad = self._named[name].grad
        if grad is None:
            return torch.zeros_like(self._named[name], memory_format=torch.contiguous_format).detach().flatten()
        if grad.is_sparse:
            raise GPPError(
                f"Parameter {name!r} has a sparse gradient and is held by several ranks, which only sum dense ones. "
                "Use `sparse=False` for its embedding, or give its stage a single device."
            )
        return grad.flatten()
