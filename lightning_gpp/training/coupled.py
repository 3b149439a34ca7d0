"""Finds optimizers that combine parameters inside of `step`: a norm or a sum over all, of which a rank has its own.

Such an optimizer would train on without a word, with the norm of its rank's stages. Nothing in its class tells, so
it is tried on small stand-ins for the parameters: on all of them together, and on those of each rank alone.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.random import seed_streams, undisturbed
from lightning_gpp.training.optimizer_copies import small_copy
from lightning_gpp.training.optimizers import OptimizerIndex

_KNOWN: Final = "torch.optim."
"""The package whose optimizers treat each parameter on its own, except L-BFGS, which is refused by its kind."""
_SCALES: Final = (1.0, 1.0, 1.0, 1.0, 1e4, 1e-4)
"""Sizes of the gradients of consecutive steps: thresholds inside of an optimizer are passed in both directions."""
_TOLERANCE: Final = 1e-6
"""Relative differences of updates that are rounding."""
_MOST: Final = 4
"""The largest size of a stand-in along each dimension."""

Trajectory = Mapping[str, Sequence[Tensor]]
"""The values of stand-ins, and of the numbers in parameter groups, after each step; the first ones are those before."""


def check_separable(index: OptimizerIndex, parts: Sequence[Collection[str]]) -> None:
    """Raise ConfigError if an optimizer cannot work on parts of its parameters, as far as a trial can tell.

    One that cannot be tried (it needs a closure, or keeps objects that stand-ins cannot replace) is taken as it is.

    Args:
        index: the optimizer of the full module.
        parts: names of the parameters that one process steps, for all of them.
    """
    optimizer = index.optimizer
    if f"{type(optimizer).__module__}.".startswith(_KNOWN) or isinstance(optimizer, LBFGS):
        return
    try:
        with undisturbed(), torch.enable_grad():
            found = _coupled(optimizer, _chosen(index, parts), parts)
    except Exception:  # whatever an optimizer raises on tensors that are not the user's
        return
    if found is not None:
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}, which combines parameters inside of its step "
            f"(a norm or a sum over all): a trial on small tensors has given another value of {found} with all "
            "parameters than with those of one device. Every rank steps only the parameters of its own stages, with "
            "strategy.step=whole, too. Use an optimizer that treats each parameter on its own; scale gradients by "
            "the norm over all stages before the step (trainer.gradient_clip_val, or "
            "self.trainer.strategy.grad_norm() in on_before_optimizer_step); or train on one device."
        )


def _chosen(index: OptimizerIndex, parts: Sequence[Collection[str]]) -> dict[str, Tensor]:
    """One parameter for each number of dimensions in a group and a part."""
    chosen, seen = dict[str, Tensor](), set[tuple[int, int, int]]()
    for number, (names, group) in enumerate(zip(index.groups, index.optimizer.param_groups, strict=True)):
        for name, parameter in zip(names, group["params"], strict=True):
            kinds = {(number, place, parameter.ndim) for place, part in enumerate(parts) if name in part}
            if parameter.requires_grad and kinds - seen:
                seen |= kinds
                chosen[name] = parameter
    return chosen


def _coupled(optimizer: Optimizer, chosen: Mapping[str, Tensor], parts: Sequence[Collection[str]]) -> str | None:
    """A value that depends on the parameters of others; None if none does, or if the optimizer draws random numbers."""
    undivided = _trial(optimizer, chosen, seed=0)
    if _difference(undivided, _trial(optimizer, chosen, seed=1)) is not None:
        return None
    alone = (_trial(optimizer, kept, seed=0) for kept in _divided(chosen, parts))
    return next((found for trial in alone if (found := _difference(undivided, trial)) is not None), None)


def _divided(chosen: Mapping[str, Tensor], parts: Sequence[Collection[str]]) -> Iterator[dict[str, Tensor]]:
    for part in parts:
        kept = {name: parameter for name, parameter in chosen.items() if name in part}
        if 0 < len(kept) < len(chosen):
            yield kept


def _trial(optimizer: Optimizer, kept: Mapping[str, Tensor], seed: int) -> Trajectory:
    """Step stand-ins of these parameters, which have the same values and gradients in all trials."""
    small = {name: _stand_in(name, parameter) for name, parameter in kept.items()}
    tried = small_copy(optimizer, {id(kept[name]): tensor for name, tensor in small.items()})
    seed_streams(seed)
    trial = defaultdict(list, _values(tried, small))
    for number, scale in enumerate(_SCALES):
        for name, parameter in small.items():
            parameter.grad = scale * _gradient(name, number, parameter)
        type(tried).step(tried)
        for name, values in _values(tried, small).items():
            trial[name] += values
    return trial


def _stand_in(name: str, parameter: Tensor) -> Tensor:
    sizes = [min(size, _MOST) for size in parameter.shape]
    return torch.nn.Parameter(_drawn(name, sizes))


def _drawn(name: str, sizes: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def _gradient(name: str, number: int, parameter: Tensor) -> Tensor:
    """A gradient whose direction changes from step to step, more for some parameters than for others."""
    steadiness = zlib.crc32(name.encode()) % 97 / 97
    steady, changing = _drawn(f"{name} steady", parameter.shape), _drawn(f"{name} {number}", parameter.shape)
    return steadiness * steady + (1 - steadiness) * changing


def _values(optimizer: Optimizer, small: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    values = {name: [parameter.detach().clone()] for name, parameter in small.items()}
    for place, group in enumerate(optimizer.param_groups):
        numbers = {key: value for key, value in group.items() if isinstance(value, int | float) and group["params"]}
        values |= {f"{key!r} in group {place}": [torch.tensor(float(each)).double()] for key, each in numbers.items()}
    return values


def _difference(undivided: Trajectory, alone: Trajectory) -> str | None:
    """The first value that is not the same in both trials."""
    return next((name for name, values in alone.items() if not _same(undivided[name], values)), None)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    start, rounding = one[0], 1e-14
    for before, now in zip(one, other, strict=True):
        moved = torch.maximum((before - start).abs().max(), (now - start).abs().max()).nan_to_num(0.0)
        most = float(_TOLERANCE * moved + rounding * start.abs().max())
        if not torch.allclose(before, now, rtol=0.0, atol=most, equal_nan=True):
            return False
    return True
