"""Hollow copies of the user's module, whose parameters take memory only while they are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.capture.kept import metrics_of, silenced
from lightning_gpp.runtime.named_tensors import replaced_tensors, tensors_of, with_values, without_memory


def hollow_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy with all parameters and buffers on the meta device, silent logging and new metrics."""
    replica = silenced(private_copy(module, lambda _, tensor: without_memory(tensor)), module)
    for metric in metrics_of(replica).values():
        metric.reset()
        metric.to(device)
    return replica


@contextmanager
def filled(replica: nn.Module, module: nn.Module, names: Iterable[str], device: torch.device) -> Iterator[None]:
    """Inside, these parameters and buffers of the replica have the module's values on the device.

    If the module is on the meta device they get small random numbers (zeros if integer).
    """
    originals, hollow = tensors_of(module), tensors_of(replica)
    with replaced_tensors(replica, [(hollow[name], _filled(originals[name], device)) for name in names]):
        yield


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        if tensor.is_meta:
            values = random_like(tuple(tensor.shape), tensor.dtype, device) * 0.02
            values = values.to(tensor.dtype)
        else:
            values = tensor.detach().to(device, copy=True)
    return with_values(tensor, values)


def random_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed numbers; booleans are true, integers zero, which is a valid index of every embedding."""
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device)
