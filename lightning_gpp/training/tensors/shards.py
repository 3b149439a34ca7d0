"""Sharded tensors: gathered for checkpoints, and sharded again when these are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_gpp.checkpoints.stored import StoredValues
from lightning_gpp.runtime.named_tensors import replaced_tensors, without_memory


def is_shard(tensor: Any) -> bool:
    """True if this is a shard of a tensor."""
    return isinstance(tensor, DTensor)


def whole_values(named: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The unsharded values of `wanted`; gathered ones are on the CPU.

    All replicas of a shard call this together, with names in the same order; tensors are gathered one by one.
    """
    found = {}
    for name, tensor in named.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            whole = value.full_tensor()
            value = whole.cpu() if name in wanted else whole
        if name in wanted:
            found[name] = value
    return found


def whole_states(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Tensor], wanted: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The same for the states of an optimizer, by parameter name; `parameters` are the module's."""
    found: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        tensors = {
            key: state_shard(value, parameters.get(name)) for key, value in state.items() if isinstance(value, Tensor)
        }
        values = whole_values(tensors, tensors.keys() if name in wanted else ())
        if name in wanted:
            found[name] = {key: values.get(key, value) for key, value in state.items()}
    return found


def state_shard(value: Any, pattern: Tensor | None) -> Any:
    """The optimizer's state of a shard, as a shard. `pattern`: the parameter; None if a hook has renamed it."""
    if (
        not isinstance(value, Tensor)
        or not isinstance(pattern, DTensor)
        or value.dim() == 0
        or value.shape != pattern.to_local().shape
    ):
        return value
    mesh, placements = pattern.device_mesh, pattern.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=pattern.shape, stride=pattern.stride())


def local_parts(values: Mapping[str, Any], pattern: Any) -> dict[str, Any]:
    """This rank's parts of an optimizer's state, as plain tensors. `pattern`: the parameter, which may be sharded."""
    parts = {name: _part_of(values, name, pattern) for name in values}
    return {name: part.to_local() if isinstance(part, DTensor) else part for name, part in parts.items()}


def _part_of(values: Mapping[str, Any], name: str, pattern: Any) -> Any:
    """Like `cut_like`; from a folder only this rank's part is read."""
    stored = values.outline(name) if isinstance(values, StoredValues) else None
    if not isinstance(values, StoredValues) or stored is None or not _fits(stored, pattern):
        return cut_like(values[name], pattern)
    part = torch.empty_like(pattern.detach(), dtype=stored.dtype)
    values.fill(name, part)
    return part


def _fits(value: Any, pattern: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(pattern, DTensor) and value.shape == pattern.shape


def cut_like(value: Any, pattern: Any) -> Any:
    """This rank's part of `value` if `pattern`, of the same shape, is sharded; otherwise `value` itself.

    Nothing is sent, because every replica has all of `value`.
    """
    if _fits(value, pattern):
        with torch.no_grad():
            return distribute_tensor(value.detach(), pattern.device_mesh, pattern.placements, src_data_rank=None)
    return value


def loadable(values: Mapping[str, Any], name: str, own: Any) -> Any:
    """A value of a state dict, as the module with the tensor `own` of this name can load it.

    From a folder it is read into `own` itself; an `own` without memory, or of another shape, gets an outline.
    """
    stored = values.outline(name) if isinstance(values, StoredValues) else None
    if not isinstance(values, StoredValues) or stored is None or not isinstance(own, Tensor):
        return cut_like(values[name], own)
    if own.is_meta or own.shape != stored.shape:
        return stored
    values.fill(name, own)
    return own.detach()


def without_shards(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which parameters without memory replace shards, for code that only reads shapes."""
    return replaced_tensors(module, [(each, without_memory(each)) for each in module.parameters() if is_shard(each)])
