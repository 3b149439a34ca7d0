"""Random projections of gradients, by which ranks compare gradients that none of them has as a whole.

A projection is linear, so those of a gradient's parts add up to that of the gradient. One random vector serves all
chunks of all parameters, with random weights for each chunk, so that long gradients cost little more than reading them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

PROJECTIONS: Final = 3
CHUNK: Final = 1 << 18


def projections(module: nn.Module) -> Tensor:
    """Products of each parameter's gradient with fixed random vectors: (parameters, PROJECTIONS) float64."""
    rows = [_projected(name, _gradient(parameter)) for name, parameter in module.named_parameters()]
    return torch.stack(rows) if rows else torch.zeros(0, PROJECTIONS, dtype=torch.float64)


def norms(module: nn.Module) -> list[float]:
    """The norm of each parameter's gradient; 0 without."""
    found = [_gradient(parameter) for parameter in module.parameters()]
    return [0.0 if grad is None else torch.linalg.vector_norm(grad.float()).item() for grad in found]


def differing(
    actual: Tensor, expected: Tensor, sizes: Sequence[float], tolerance: float, noise: float = 0.0
) -> list[int]:
    """Positions of the gradients that differ by more than `tolerance` of their norm, or of a small part of the largest.

    Args:
        actual, expected: (parameters, PROJECTIONS).
        sizes: the norms of the expected gradients.
        noise: the part of the largest norm that rounding explains in every gradient, also in one that is almost zero.
    """
    errors, scale = (actual - expected).abs().amax(dim=1).tolist(), max(sizes, default=0.0)
    limits = [max(5 * tolerance * max(norm, 1e-3 * scale, 1e-12), noise * scale) for norm in sizes]
    return [position for position, (error, limit) in enumerate(zip(errors, limits, strict=True)) if error > limit]


def distance(actual: Tensor, expected: Tensor) -> float:
    """An estimate of the norm of the difference of all gradients, from their projections."""
    return float((actual - expected).square().mean(dim=1).sum().sqrt())


def _gradient(parameter: Tensor) -> Tensor | None:
    """The gradient, dense; None for parameters without one, and those of other ranks."""
    gradient = None if parameter.is_meta else parameter.grad
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _projected(name: str, gradient: Tensor | None) -> Tensor:
    row = torch.zeros(PROJECTIONS, dtype=torch.float64)
    if gradient is None:
        return row
    flat = gradient.detach().resolve_conj().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    exact = torch.float64 if flat.dtype == torch.float64 else torch.float32
    vectors, generator = _vectors(flat.device, exact), torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for chunk in flat.split(CHUNK):
        weights = torch.randn(PROJECTIONS, generator=generator, dtype=torch.float64)
        row += weights * (chunk.to(exact) @ vectors[: len(chunk)]).to("cpu", torch.float64)
    return row


def forget_vectors() -> None:
    """Free the random vectors, which are made anew when they are needed."""
    _vectors.cache_clear()


@functools.cache
def _vectors(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(CHUNK, PROJECTIONS, generator=generator, dtype=torch.float64).to(device, dtype)
