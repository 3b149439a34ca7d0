"""Reductions and gathers over pipelines, with Lightning's names for operations."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather


def reduce_over(tensor: Tensor, group: dist.ProcessGroup, operation: str | dist.ReduceOp | None) -> Tensor:
    """Reduce in place: `mean` or `avg`, `sum` (None) or another operation of torch.distributed, by name or itself."""
    if isinstance(operation, str) and operation.lower() in ("mean", "avg"):
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no mean
        return tensor.copy_(tensor / dist.get_world_size(group))
    if isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper())
    dist.all_reduce(tensor, dist.ReduceOp.SUM if operation is None else operation, group)
    return tensor


def gather_over(tensor: Tensor, group: dist.ProcessGroup, sync_grads: bool) -> Tensor:
    """Stack the tensors of all; gradients flow back through it if `sync_grads`."""
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return torch.stack(all_gather(tensor.contiguous(), group))
