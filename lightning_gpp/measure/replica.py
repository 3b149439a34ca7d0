"""Hollow copies of the user's module, whose parameters take memory only while they are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.isolate import names_of, private_copy
from lightning_gpp.capture.kept import keep_apart, metrics_of


def hollow_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy with all parameters and buffers on the meta device, silent logging and new metrics."""
    memo = {id(tensor): _hollow(tensor) for tensor, _ in names_of(module)}
    replica = private_copy(module, memo)
    for metric in metrics_of(replica).values():
        metric.reset()
        metric.to(device)
    keep_apart(replica, module)
    if hasattr(replica, "log_dict"):
        vars(replica).update(log=_nothing, log_dict=_nothing, print=_nothing)
    return replica


@contextmanager
def filled(replica: nn.Module, module: nn.Module, names: Iterable[str], device: torch.device) -> Iterator[None]:
    """Inside, these parameters and buffers of the replica have the module's values on the device.

    If the module is on the meta device they get small random numbers (zeros if integer).
    """
    originals = {name: tensor for tensor, name in names_of(module)}
    hollow = {name: tensor for tensor, name in names_of(replica)}
    full = {name: _filled(originals[name], device) for name in names}
    _swap(replica, {id(hollow[name]): tensor for name, tensor in full.items()})
    try:
        yield
    finally:
        _swap(replica, {id(tensor): hollow[name] for name, tensor in full.items()})


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        if tensor.is_meta:
            values = random_like(tuple(tensor.shape), tensor.dtype, device) * 0.02
            values = values.to(tensor.dtype)
        else:
            values = tensor.detach().to(device, copy=True)
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def random_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed numbers; booleans are true, integers zero, which is a valid index of every embedding."""
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device)


def _swap(replica: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Replace tensors under all of their names, those of tied ones included."""
    for owner in replica.modules():
        named = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) in replacements:
                setattr(owner, name, replacements[id(tensor)])


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces logging while a step is measured."""
