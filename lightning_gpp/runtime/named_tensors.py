"""The parameters and buffers of a module by name, and others in their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name: the first one under which a tied tensor is found."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensor_named(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def paths_around(name: str) -> list[str]:
    """The paths of the modules around a tensor or module, the outermost first, without the module that has them all."""
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


Swaps = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a module, each with the one that replaces it."""


def replace_tensors(module: nn.Module, swaps: Swaps) -> None:
    """Replace parameters and buffers by other tensors, under all of their names."""
    known = {id(before): after for before, after in swaps}
    for part in module.modules():
        named = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) in known:
                setattr(part, name, known[id(tensor)])


@contextmanager
def replaced_tensors(module: nn.Module, swaps: Swaps) -> Iterator[None]:
    """Inside, parameters and buffers are replaced by other tensors."""
    replace_tensors(module, swaps)
    try:
        yield
    finally:
        replace_tensors(module, [(after, before) for before, after in swaps])


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users and libraries have set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name != "origins"}


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """A tensor of the same kind with these values, without hooks."""
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=tensor.requires_grad)
    vars(parameter).update(attributes_of(tensor))
    return parameter


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same kind without memory, which belongs to no rank."""
    return with_values(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
