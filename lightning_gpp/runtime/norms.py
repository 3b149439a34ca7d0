"""The norm of a vector with parts on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.errors import ConfigError


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
