"""CUDA graphs as the recorder of stages, and CUDA streams for concurrent ones; no other file of these needs a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp._compat.torch import leave_pool
from lightning_gpp.runtime.concurrent import Streams
from lightning_gpp.runtime.recorded_stage import Recorder, Repeat

_JOIN_STREAMS: Final = "set_override_stale_capture_stream"
"""Torch's switch to add gradients in the stream of a capture. Otherwise, if a user's list keeps the graph of a loss,
they are added in the stream in which that was computed, and the capture fails.
"""


def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder of a device's launches; None if it has none.

    Memory of a record stays in its place only in torch's own allocator; CUDA's frees it when the record ends.
    """
    is_possible = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
    return CudaGraphs(device) if is_possible else None


def streams_on(device: torch.device) -> Streams | None:
    """The streams of a device; None if it has none."""
    return CudaStreams(device) if device.type == "cuda" else None


class CudaGraphs:
    """Records launches as CUDA graphs that share one pool of memory.

    The calls of other threads, such as those that pin memory for a data loader, do not disturb a record.
    """

    draws_apart = torch.__version__ >= "2.13"  # before, all graphs read their seeds from the same memory

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._invalid: list[torch.cuda.CUDAGraph] = []

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def apart(self) -> CudaGraphs:
        return CudaGraphs(self._device)

    def record(self, work: Callable[[], object]) -> Repeat:
        if self._pool is None:
            self._open_pool()
        try:
            return self._captured(work).replay
        finally:
            if self._pool is None:  # before torch 2.13 nothing draws random numbers until a capture succeeds again
                self._open_pool()

    def _open_pool(self) -> None:
        """Take a new pool, with a graph that stays: torch refuses a pool whose graphs are all gone."""
        if _JOIN_STREAMS in vars(torch.autograd.graph):  # since torch 2.13
            vars(torch.autograd.graph)[_JOIN_STREAMS](True)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._captured(partial(torch.zeros, 1, device=self._device))

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # for the pool; during a capture torch frees nothing that it keeps for others
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # which says only that the record is invalid
                    self._end(graph)
                raise
            self._end(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. One that fails spoils its pool; torch goes on asking its graph which memory is for it."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # as that of a W that has nothing to do
                graph.capture_end()
        except BaseException:
            self._invalid.append(graph)
            leave_pool(self._device, self._pool)
            self._pool = self._keeper = None
            raise

    def unowned(self, tensor: Tensor) -> Tensor:
        """The tensor's memory by its address. Pools keep their memory while one of their graphs lives."""
        if not tensor.numel():
            return tensor.detach()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.as_tensor(_Memory(tensor.data_ptr(), span * tensor.element_size()), device=self._device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes on the GPU, as every array library describes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaStreams:
    """Streams of a GPU, made when they are first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

    def on(self, number: int) -> AbstractContextManager[Any]:
        if not number:
            return nullcontext()
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._streams[number])

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))
