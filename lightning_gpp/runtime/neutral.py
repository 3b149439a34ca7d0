"""Makes random operators the same in a split and an unsplit run: dropout keeps everything, other draws repeat."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import torch

from lightning_gpp._compat.torch import TorchDispatchMode, schema_arguments
from lightning_gpp.runtime.random import current_generators

_RATES: Final = ("dropout_p", "dropout")
"""Names of the rate of dropout among the arguments of fused operators, and of their backwards."""
_SEED: Final = "dropout_seed"
"""An argument of the operator that only makes a state for dropout, which needs a rate."""


class Neutral(TorchDispatchMode):
    """Inside, every draw starts from the same seed, masks (Bernoulli draws) are all ones, and fused operators such as
    attention have no dropout: neither they, nor their backwards, which would take a mask that was never drawn.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        for place, name in _rates_of(func):
            if name in kwargs:
                kwargs[name] = 0.0
            elif place < len(args):
                args[place] = 0.0
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        for generator in current_generators():  # torch.manual_seed asks all kinds of devices, and is slow
            generator.manual_seed(0)
        result = func(*args, **kwargs)
        if "bernoulli" in func.name() and isinstance(result, torch.Tensor):
            result.fill_(1)
        return result


@functools.cache
def _rates_of(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of an operator's rates of dropout among its arguments."""
    return tuple(_found_in([argument.name for argument in schema_arguments(func)]))


def _found_in(names: list[str]) -> Iterator[tuple[int, str]]:
    if _SEED not in names:
        yield from ((place, name) for place, name in enumerate(names) if name in _RATES)
