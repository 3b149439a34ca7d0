"""Makes random operators the same in a split and an unsplit run: dropout keeps everything, other draws repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_gpp._compat.torch import TorchDispatchMode, schema_arguments


class Neutral(TorchDispatchMode):
    """Inside, every draw starts from the same seed, and masks (Bernoulli draws) are all ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        torch.manual_seed(0)
        result = func(*_without_dropout(func, args), **{name: kwargs[name] for name in kwargs if name != "dropout_p"})
        if "bernoulli" in func.name() and isinstance(result, torch.Tensor):
            result.fill_(1)
        return result


def _without_dropout(func: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a fused attention with its dropout switched off."""
    names = [argument.name for argument in schema_arguments(func)]
    return [0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=False)]
