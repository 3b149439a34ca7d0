"""Results of steps that checks compare: projections of gradients, and logged values.

Ranks compare gradients that none of them has as a whole by random projections. A projection is linear, so those of a
gradient's parts add up to that of the gradient. One random vector serves all chunks of all parameters, with random
weights for each chunk, so that long gradients cost little more than reading them.

Logged values of micro-batches are combined to that of the mini-batch. With `reduce_fx="sum"`, `"max"` or `"min"` they
are reduced, too, or not: a count of right answers adds up, and a largest logit is the largest one of the micro-batches;
the number of the batch is the same for every micro-batch, and a mean loss is a mean of theirs. The name does not tell,
so both are tried on a few samples, undivided and in micro-batches. The same runs tell which values, whose mean is
logged, are no means over samples (an F1 score).
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

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


REDUCTIONS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {"sum": sum, "max": max, "min": min, "mean": sum}
"""The reductions over batches, with what values of micro-batches may need instead of their mean."""
_PLACE = 4
"""The place of `reduce_fx` among the positional arguments of `self.log` after name and value."""

Near = Callable[[float, float], bool]
"""True for numbers that only rounding tells apart."""


class Logged:
    """The logged values by name, in the order of the runs of the step.

    Attributes:
        values: values of each name.
        plain: names that were logged as plain numbers.
        reductions: the reduction of each name.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.plain: set[str] = set()
        self.reductions: dict[str, str] = {}

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Inside, a copy of a module whose logs are ignored has these calls recorded."""
        ignored: dict[str, Any] = {name: vars(module).pop(name) for name in ("log", "log_dict") if name in vars(module)}
        if ignored:
            vars(module)["log"] = self._record
        try:
            yield
        finally:
            vars(module).pop("log", None)
            vars(module).update(ignored)

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("reduce_fx", args[_PLACE] if len(args) > _PLACE else "mean")
        reduction = str(getattr(given, "__name__", given)).lower()
        value = value.detach() if isinstance(value, Tensor) else value
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and reduction in REDUCTIONS:
            self.values.setdefault(name, []).append(float(value))
            self.reductions[name] = reduction
            if not isinstance(value, Tensor):
                self.plain.add(name)


def other_reductions(whole: Logged, parts: Logged, near: Near) -> dict[str, str]:
    """Combinations of values of micro-batches, by name, where they are not those of batches.

    A logged mean may be a sum over samples (zeros are both, and stay means). Another reduction may be meant over
    batches only; a plain number that is zero everywhere counts as one: it was not computed from samples.
    """
    found = {}
    for name, values in parts.values.items():
        given, reduction = whole.values.get(name, []), parts.reductions[name]
        if len(given) != 1:
            continue
        averages, reduces = near(sum(values) / len(values), given[0]), near(REDUCTIONS[reduction](values), given[0])
        if reduction == "mean" and reduces and not averages:
            found[name] = "sum"
        elif reduction != "mean" and averages and (name in parts.plain or not reduces):
            found[name] = "mean"
    return found


def unlike_means(whole: Logged, parts: Logged, shares: Sequence[float], near: Near) -> list[str]:
    """The names whose undivided value is not the mean of those of micro-batches by their shares, which is logged."""
    found = []
    for name, values in parts.values.items():
        given = whole.values.get(name, [])
        comparable = parts.reductions[name] == "mean" and len(given) == 1 and len(values) == len(shares)
        if comparable and all(map(math.isfinite, (*given, *values))):
            mean = sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
            if not near(mean, given[0]):
                found.append(name)
    return found
