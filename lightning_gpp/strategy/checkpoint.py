"""Checkpoints as one device writes them: whole states under original names, merged on global rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.errors import CheckpointError
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.optimizers import OptimizerIndex
from lightning_gpp.strategy.parameters import Placement, materialise, replace_tensors, tensors_of

KEY = "gpp"
"""Entry of a checkpoint: seed and step counter of the random streams, and the plan's text."""


def whole_state(module: nn.Module, placement: Placement, control: Control) -> dict[str, Any]:
    """The module's state dict. On global rank 0 every entry has values; elsewhere foreign ones are meta tensors.

    All ranks must call it.
    """
    tensors = tensors_of(module)
    names = {id(tensor): name for name, tensor in tensors.items()}
    mine = {name: tensors[name].detach() for name in placement.held_by(control.device)}
    received = merge(mine, control)
    state = module.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = received.get(names.get(id(value), ""), value.detach())
    return state


def merge(mine: Mapping[str, Any], control: Control) -> dict[str, Any]:
    """On global rank 0 the entries of all ranks of its pipeline; elsewhere one's own. All ranks must call it."""
    if control.pipeline == 0 and control.device > 0:
        control.send_tree(dict(mine), dst=0)
    merged = dict(mine)
    if control.rank == 0:
        for device in range(1, control.num_devices):
            merged.update(control.receive_tree(src=device))
    return merged


def whole_optimizer_state(index: OptimizerIndex, placement: Placement, control: Control) -> dict[str, Any]:
    """The optimizer's state dict in the user's original indexing; complete on global rank 0. All ranks must call it."""
    held = set(placement.held_by(control.device))
    mine = {name: state for name, state in index.state().items() if name in held}
    return index.merged(merge(mine, control))


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict of the whole module into one that may have parts without memory.

    Raises:
        CheckpointError: keys or shapes do not fit.
    """
    tensors = tensors_of(module)
    names = {id(tensor): name for name, tensor in tensors.items()}
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_meta and key in state:
            materialise(module, [names[id(value)]])
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint does not fit {type(module).__name__} (ckpt_path, strict={strict}). {error} Load a "
            "checkpoint of the same model, or set `strict_loading = False` on the module."
        ) from error


def make_whole(module: nn.Module, placement: Placement, control: Control) -> None:
    """Give global rank 0 the values of all parameters and buffers, on the CPU. All ranks must call it."""
    tensors = tensors_of(module)
    received = merge({name: tensors[name].detach() for name in placement.held_by(control.device)}, control)
    if control.rank != 0:
        return
    swaps = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            swaps[id(tensor)] = (tensor, _filled(tensor, received[name]))
    replace_tensors(module, swaps)


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def entry(seed: int, step: int, plan: str) -> dict[str, Any]:
    """What a checkpoint tells a later run of this library."""
    return {"seed": seed, "step": step, "plan": plan, "torch": str(torch.__version__)}
