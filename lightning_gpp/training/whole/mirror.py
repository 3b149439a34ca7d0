"""Gives all ranks of a pipeline what its first rank has: mini-batches, results, and the state of random streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.runtime.transport import as_sent
from lightning_gpp.training.control import Control


class Mirror:
    """Broadcasts from the rank that loads the data to all ranks of its pipeline, which call this together.

    Args:
        control: the side channel of this rank.
        device: the device of this rank.
    """

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device = control, device

    def tree(self, tree: Any) -> Any:
        """A structure of tensors and values; tensors on an accelerator come to that of each rank."""
        control = self._control
        if control.num_devices == 1:
            return tree
        return self._shared(tree, control.runs_step, control.share_object, self.tensor)

    def in_device(self, tree: Any) -> Any:
        """A structure of tensors and values of the first member of this device, on all members."""
        control = self._control
        if control.num_members == 1:
            return tree
        return self._shared(tree, control.member == 0, control.share_object_in_device, self._tensor_in_device)

    def _shared(self, tree: Any, mine: bool, share: Callable[[Any], Any], fill: Callable[[Tensor], Tensor]) -> Any:
        leaves, structure = pytree.tree_flatten(tree)
        outline = [_Outline(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        outline, structure = share((outline, structure) if mine else None)
        known = leaves if mine else outline
        pairs = zip(known, outline, strict=True)
        return pytree.tree_unflatten([self._leaf(*pair, mine, fill) for pair in pairs], structure)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor, of the same form on all ranks, with the values of the first rank; returns it."""
        mesh = self._control.mesh
        group = mesh.pipeline_control_group if tensor.device.type == "cpu" else mesh.pipeline_group
        if self._control.num_devices > 1:
            dist.broadcast(as_sent(tensor), group_src=0, group=group)
        return tensor

    def _tensor_in_device(self, tensor: Tensor) -> Tensor:
        mesh = self._control.mesh
        group = mesh.member_control_group if tensor.device.type == "cpu" else mesh.member_group
        dist.broadcast(as_sent(tensor), group_src=0, group=group)
        return tensor

    def streams(self) -> None:
        """Continue the user's random streams of the first rank: Python's, NumPy's, and torch's on CPU and device."""
        control = self._control
        if control.num_devices == 1:
            return
        states = control.share_object(self._states() if control.runs_step else None)
        if not control.runs_step:
            self._go_on(states)

    @contextmanager
    def one_stream(self) -> Iterator[None]:
        """Inside, all processes draw the random numbers of the first one; afterwards the others go on with theirs."""
        first, before = self._control.first, self._states()
        self._go_on(self._control.broadcast(before))
        try:
            yield
        finally:
            if not first:
                self._go_on(before)

    def _go_on(self, states: list[Any]) -> None:
        python, numpy, cpu, *accelerator = states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for state in accelerator:
            torch.cuda.set_rng_state(state, self._device)

    def _states(self) -> list[Any]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [random.getstate(), np.random.get_state(), torch.get_rng_state(), *cuda]

    def _leaf(self, leaf: Any, outline: Any, mine: bool, fill: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(outline, _Outline):
            return leaf
        if mine:
            fill(leaf.detach().contiguous())
            return leaf
        device = torch.device("cpu") if outline.on_cpu else self._device
        return fill(torch.empty(outline.shape, dtype=outline.dtype, device=device))


class _Outline:
    """The form of a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"
