"""Copies of the user's module on which steps run without a trace in the module itself."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp._compat.lightning_module import set_trainer, trainer_of
from lightning_gpp.capture.attributes import FRAMEWORKS, OF_EVERY_MODULE
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.metrics import keep_apart
from lightning_gpp.training.foreign import Foreign, Whereabouts, foreign_like
from lightning_gpp.training.parameters import flatten, tensors_of, with_values
from lightning_gpp.user_code import own_attributes

SMALL: Final = 1 << 24
"""Bytes of a tensor or array that is copied, although it is not known that a step changes it."""

_CONTAINERS: Final = (list, tuple, set, dict)
_DUPLICATED: Final = (deque, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH: Final = 4


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
    _add_belongings(module.modules(), memo)
    copied = silenced(private_copy(module, memo), module)
    for metric in (part for part in copied.modules() if isinstance(part, Metric)):
        metric.to(device)
    flatten(copied)
    return copied


def step_copy(module: nn.Module, changed: Collection[str]) -> nn.Module:
    """A copy on which the step can run with results of its network calls, for little time and memory.

    It shares parameters and large buffers with the module. It logs nothing.

    Args:
        module: the module.
        changed: names of parameters and buffers that the step may change; the copy has its own.
    """
    memo: dict[int, Any] = {}
    for name, tensor in tensors_of(module).items():
        own = name in changed or (not isinstance(tensor, nn.Parameter) and _is_small(tensor))
        memo[id(tensor)] = with_values(tensor, tensor.detach().clone()) if own and not _is_foreign(tensor) else tensor
    _add_belongings(module.modules(), memo)
    return silenced(private_copy(module, memo), module)


def _is_foreign(tensor: Tensor) -> bool:
    return isinstance(tensor, Foreign) or tensor.is_meta


def _is_small(value: Tensor | np.ndarray) -> bool:
    return value.nbytes <= SMALL


def silenced(copied: nn.Module, module: nn.Module) -> nn.Module:
    """The copy of a module, which logs nothing from now on."""
    for part in (part for part in copied.modules() if hasattr(part, "log_dict")):
        vars(part).update(log=_ignore, log_dict=_ignore)
        set_trainer(part, trainer_of(module))
    keep_apart(copied, module)
    return copied


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces logging in a copy."""


# -- what belongs to the module besides its tensors and parts ---------------------------------------------------------


def _add_belongings(modules: Iterator[nn.Module], memo: dict[int, Any]) -> None:
    """Add copies of what a step may change in the attributes of modules; other objects are shared by copies."""
    for part in modules:
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE:
                _add(value, memo, 0)


def _add(value: Any, memo: dict[int, Any], depth: int) -> None:
    if id(value) in memo or isinstance(value, _PLAIN):
        return
    if isinstance(value, _CONTAINERS):
        for item in (value.values() if isinstance(value, dict) else value) if depth < _DEPTH else ():
            _add(item, memo, depth + 1)
    elif isinstance(value, Tensor):
        if _is_small(value) and not _is_foreign(value) and not isinstance(value, nn.Parameter):
            memo[id(value)] = value.detach().clone()
    elif _is_light(value, depth):
        with suppress(Exception):  # objects that refuse to be copied are shared
            memo[id(value)] = copy.deepcopy(value)


def _is_light(value: Any, depth: int) -> bool:
    """True for objects of few numbers, such as averages and generators, which are no part of a larger program."""
    if isinstance(value, (*_PLAIN, *_DUPLICATED, Metric)):
        return True
    if isinstance(value, Tensor | np.ndarray):
        return _is_small(value)
    if isinstance(value, _CONTAINERS):
        items = list(value.values() if isinstance(value, dict) else value)
        return len(items) <= 1000 and depth < _DEPTH and all(_is_light(item, depth + 1) for item in items)
    users = type(value).__module__.split(".")[0] not in FRAMEWORKS and not callable(value)
    attributes = own_attributes(value) if users else None
    return attributes is not None and depth < _DEPTH and _is_light(attributes, depth + 1)
