"""Copies of the user's module on which steps run without a trace in the module itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp._compat.lightning_module import set_trainer, trainer_of
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.kept import kept_by
from lightning_gpp.capture.metrics import keep_apart
from lightning_gpp.training.tensors.foreign import Foreign, Whereabouts, foreign_like
from lightning_gpp.training.tensors.parameters import flatten, tensors_of, with_values

SMALL: Final = 1 << 24
"""Bytes of a tensor in attributes that is copied, although it is not known that a step changes it."""


def silent_copy(
    module: nn.Module, device: torch.device, elsewhere: Mapping[str, Whereabouts] | None = None
) -> nn.Module:
    """A copy on a device, which logs nothing. What is `elsewhere` is foreign, as in training."""
    memo: dict[int, Any] = {}
    for name, tensor in tensors_of(module).items():
        if elsewhere and name in elsewhere:
            memo[id(tensor)] = foreign_like(tensor, device, [elsewhere[name]])
        else:
            memo[id(tensor)] = with_values(tensor, tensor.detach().to(device, copy=True))
    for tensor in kept_by(module.modules()).tensors:
        if _is_small(tensor) and not _is_foreign(tensor):
            memo.setdefault(id(tensor), tensor.detach().clone())
    copied = silenced(private_copy(module, memo), module)
    for metric in (part for part in copied.modules() if isinstance(part, Metric)):
        metric.to(device)
    flatten(copied)
    return copied


def _is_foreign(tensor: Tensor) -> bool:
    return isinstance(tensor, Foreign) or tensor.is_meta


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= SMALL


def silenced(copied: nn.Module, module: nn.Module) -> nn.Module:
    """The copy of a module, which logs nothing from now on."""
    for part in (part for part in copied.modules() if hasattr(part, "log_dict")):
        vars(part).update(log=_ignore, log_dict=_ignore)
        set_trainer(part, trainer_of(module))
    keep_apart(copied, module)
    return copied


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces logging in a copy."""
