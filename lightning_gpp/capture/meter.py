"""Meters recorded calls: FLOPs, bytes that autograd keeps, and draws of random numbers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_gpp._compat.torch import FLASH_ATTENTION_FOR_CPU, TorchDispatchMode, pytree, storage_id
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.user_code import user_line

if TYPE_CHECKING:
    from lightning_gpp.capture.recorder import Recorder


class Meter(TorchDispatchMode):
    """Adds the cost of every kernel to the call that is being recorded.

    Autograd's graph owns its hooks and what they pack, unseen by the garbage collector. So a graph that the recorder
    keeps alive must not own the recorder, nor a tensor whose gradient it computes, after the recording.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder: Recorder = weakref.proxy(recorder)
        self._packed: list[list[torch.Tensor]] = []

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for packed in self._packed:
            packed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and self._recorder.scope != -1 and not self._recorder.paused:
            self._refuse(func)
        result = func(*args, **kwargs)
        call = self._recorder.current
        if call is not None:
            call.flops += _flops(func, args, kwargs, result)
            call.random = call.random or torch.Tag.nondeterministic_seeded in func.tags
        return result

    def _refuse(self, func: Any) -> None:
        """Refuse collectives that change tensors in place inside of forwards, which cannot be seen, nor replayed."""
        if "barrier" not in func.name():
            raise refusal(
                user_line(),
                f"the forward communicates ({func.name()}), which would be left out where it is cut",
                "put it into the forward of a module of its own, which is then never cut",
                self._recorder.recording.called(self._recorder.scope),
            )

    def saved(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Hook for tensors that autograd keeps: notes their memory, except for states and in checkpointed regions.

        Returns:
            The tensor in a list, which is empty after the recording.
        """
        recorder = self._recorder
        call, storage = recorder.current, storage_id(tensor)
        if call is not None and call.checkpoint is None and not recorder.tensors.states_in([tensor]):
            recorder.tensors.keep(tensor)
            call.saved[storage] = tensor.untyped_storage().nbytes()
        self._packed.append([tensor])
        return self._packed[-1]


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is FLASH_ATTENTION_FOR_CPU:
        return float(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func.is_view:
        return 0.0
    return float(sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)))
