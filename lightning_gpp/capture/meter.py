"""Counts what each recorded call costs: FLOPs, bytes that autograd keeps, whether it draws random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

if TYPE_CHECKING:
    from lightning_gpp.capture.recorder import Recorder


class Meter(TorchDispatchMode):
    """Adds the cost of every kernel to the call that the recorder is in."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        call = self._recorder.current
        if call is not None:
            call.flops += _flops(func, args, kwargs, result)
            call.random = call.random or torch.Tag.nondeterministic_seeded in func.tags
        return result

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook for tensors that autograd keeps; each memory counts once, parameters and checkpointed regions do not."""
        call = self._recorder.current
        storage = tensor.untyped_storage()
        if call is not None and call.checkpoint is None and storage._cdata not in self._recorder.seen_storages:
            self._recorder.seen_storages.add(storage._cdata)
            self._recorder.keep(tensor)
            call.saved_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func.is_view:
        return 0.0
    return float(sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)))
