"""Offload: what a stage's forward keeps for its backward lies in host memory in between.

    F    autograd saves tensors through hooks, which note them (`SavedTensor`) and their storages (`SavedBlock`)
    O    the blocks are copied to pinned host memory, on a stream of their own
    ...  before the second computing action after O, the device's stream waits for the copies, and the device forgets
         the blocks; so their memory is used again in the order of the stream, although the host runs ahead
    L    the blocks are copied back, into memory of the device's stream, on another stream
    B    waits for the copies; autograd gets its tensors, and frees them as it goes

The graph alone owns the blocks: with it they are gone, wherever they lie. Not copied are parameters and buffers, and
the inputs that collect gradients, which the device holds anyway; tensors elsewhere than on the device; and those that
are not one dense block of memory: sparse, nested and quantized tensors, lazy conjugates, and tensors of subclasses.

Sources: PipeOffload (Wan et al., arXiv 2503.01328) for copies hidden behind the computation of other micro-batches;
`torch.autograd.graph.save_on_cpu` for the hooks.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_gpp._compat.torch import buffers_of, parameters_of, storage_id, version
from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.stage import MicroBatch, StageForward
from lightning_gpp.runtime.weights.derived import Derived
from lightning_gpp.schedules.work import Leaving


def changed_in_place(shape: Sequence[int], found: int, expected: int, until: str) -> GPPError:
    """The error for a tensor that was changed in place after autograd had saved it, in autograd's own words.

    Args:
        shape: its sizes.
        found: its number of in-place changes.
        expected: the number when it was saved.
        until: when it is needed last.
    """
    return GPPError(
        "One of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(shape)} is at version {found}; expected version {expected} instead. It is needed until {until}: "
        "change a clone() of it."
    )


class SavedBlock:
    """The bytes of a storage that autograd saved: on the device, on the host, or on both while a copy is under way."""

    __slots__ = ("__weakref__", "on_device", "on_host")

    def __init__(self, tensor: Tensor) -> None:
        self.on_device: Tensor | None = _view(tensor, torch.uint8, 0, (tensor.untyped_storage().nbytes(),), (1,))
        self.on_host: Tensor | None = None


def _view(memory: Tensor, dtype: torch.dtype, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor in the memory of another one, without its history."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, sizes, strides)


class SavedTensor:
    """A tensor that autograd saved; `block` is None if it stays on the device."""

    __slots__ = ("__weakref__", "_expected", "_found", "_place", "_tensor", "block")

    def __init__(self, tensor: Tensor, block: SavedBlock | None) -> None:
        self._tensor: Tensor | None = tensor.detach()  # its history may lead to the node that saves it: a cycle
        self._expected = self._found = version(tensor)
        self._place: tuple[torch.dtype, int, Sequence[int], Sequence[int]] | None = None
        self.block = block

    def leave(self) -> None:
        """Forget the tensor, of which the host has a copy."""
        tensor = self._tensor
        if tensor is not None:
            self._place = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
            self._found, self._tensor = version(tensor), None

    def get(self) -> Tensor:
        """The tensor, on the device. Raises GPPError if it was changed in place since it was saved, like autograd."""
        if self._tensor is not None:
            self._found = version(self._tensor)
        tensor = self._loaded() if self._tensor is None else self._tensor
        if self._found != self._expected:
            raise changed_in_place(tensor.shape, self._found, self._expected, "the backward")
        return tensor

    def _loaded(self) -> Tensor:
        if self._place is None or self.block is None or self.block.on_device is None:
            raise GPPError("A tensor of a stage that offloads was read before it was loaded (strategy.offload).")
        return _view(self.block.on_device, *self._place)


class HostLink:
    """The copies between a device and its host: one stream in each direction; without CUDA a copy ends at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        there, back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._there, self._back = there, back
        self.leaving: Leaving[Offloaded, Offloaded] = Leaving()

    def to_host(self, blocks: Iterable[SavedBlock]) -> torch.cuda.Event | None:
        """Start to copy blocks to the host; returns the event of the end."""
        with _on(self._there, self.device):
            for block in blocks:
                assert block.on_device is not None
                size, pinned = len(block.on_device), self._there is not None
                block.on_host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                block.on_host.copy_(block.on_device, non_blocking=pinned)
        return self._there.record_event() if self._there is not None else None

    def to_device(self, blocks: Sequence[SavedBlock], copied: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Start to copy blocks back after their copies to the host have ended; returns the event of the end."""
        for block in blocks:  # in memory of the device's own stream, in whose order it is freed
            assert block.on_host is not None
            block.on_device = torch.empty(len(block.on_host), dtype=torch.uint8, device=self.device)
        if self._back is not None and copied is not None:
            self._back.wait_event(copied)
        with _on(self._back, self.device):
            for block in blocks:
                assert block.on_device is not None
                assert block.on_host is not None
                block.on_device.copy_(block.on_host, non_blocking=self._back is not None)
                block.on_host = None
        return self._back.record_event() if self._back is not None else None

    def wait(self, end: torch.cuda.Event | None) -> None:
        """Let the device wait for the end of a copy; the host goes on."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)

    def compute(self) -> None:
        """Note that a computing action begins; tensors of the OFFLOAD before the latest one leave the device."""
        for offloaded in self.leaving.compute():
            offloaded.leave()

    def release(self) -> None:
        """Let tensors of the OFFLOAD before the latest computing action leave the device, as others need memory."""
        for offloaded in self.leaving.release():
            offloaded.leave()

    def settle(self) -> None:
        """Let all tensors that are being copied to the host leave the device."""
        self.compute()
        self.compute()

    def clear(self) -> None:
        """Forget all copies; the device waits for those under way, whose memory may now be used for something else."""
        self.leaving = Leaving()
        for stream in (self._there, self._back):
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)


@contextmanager
def _on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Inside, work is queued on a stream, after all that the device's own stream has been given so far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


KeptTensors = tuple[list["ref[SavedTensor]"], Any]
"""The tensors that a forward keeps, and the end of their copy to the host."""


class Offloaded:
    """The tensors that a stage's forward keeps for the backward of one micro-batch; reusable for the next one."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.clear()

    def clear(self) -> None:
        """Forget all tensors."""
        self._saved: list[ref[SavedTensor]] = []
        self._copied: torch.cuda.Event | None = None
        self._loaded: torch.cuda.Event | None = None

    @contextmanager
    def recording(self, staying: Iterable[Tensor], derived: Derived | None = None) -> Iterator[None]:
        """Inside, autograd's saved tensors are noted. Nothing is copied of the memory of `staying` and `derived`."""
        self.clear()
        left_out = ChainMap({storage_id(tensor): tensor for tensor in staying}, derived.memory if derived else {})
        blocks: WeakValueDictionary[int, SavedBlock] = WeakValueDictionary()
        noted = self._saved

        def pack(tensor: Tensor) -> SavedTensor:
            if not _is_dense(tensor) or tensor.device.type != self._link.device.type:
                return SavedTensor(tensor, None)
            key = storage_id(tensor)
            block = None if key in left_out else blocks.get(key)
            if block is None and key not in left_out:
                block = blocks[key] = SavedBlock(tensor)
            saved = SavedTensor(tensor, block)
            noted.append(ref(saved))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.get):
            yield

    def start(self) -> None:
        """Start to copy them to the host."""
        self._copied = self._link.to_host(self._blocks())
        self._link.leaving.add(self, self)

    def leave(self) -> None:
        """Forget them on the device, which waits for the end of their copy."""
        self._link.wait(self._copied)
        for saved in self._present():
            saved.leave()
        for block in self._blocks():
            block.on_device = None

    def load(self) -> None:
        """Start to copy them back; those that have not left the device stay there."""
        if not self._link.leaving.keep(self):
            self._link.release()
            absent = [block for block in self._blocks() if block.on_device is None]
            self._loaded = self._link.to_device(absent, self._copied)

    def wait(self) -> None:
        """Let the device wait until they are back."""
        self._link.wait(self._loaded)

    def take(self) -> KeptTensors:
        """Hand over the tensors of this micro-batch."""
        kept = self._saved, self._copied
        self.clear()
        return kept

    def put(self, kept: KeptTensors) -> None:
        """Take back what `take` handed over."""
        self.clear()
        self._saved, self._copied = kept

    def _present(self) -> list[SavedTensor]:
        """The tensors that autograd still has and that do not stay on the device."""
        return [saved for one in self._saved if (saved := one()) is not None and saved.block is not None]

    def _blocks(self) -> list[SavedBlock]:
        return list(dict.fromkeys(saved.block for saved in self._present() if saved.block is not None))


def _is_dense(tensor: Tensor) -> bool:
    """True if the tensor is determined by its bytes, sizes and strides."""
    plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def offloading(
    forward: StageForward, offloaded: Offloaded, parts: Sequence[nn.Module], derived: Derived | None = None
) -> StageForward:
    """A forward whose saved tensors are noted.

    Args:
        forward: the forward of a stage.
        offloaded: takes note of them.
        parts: the stage's modules, whose parameters and buffers stay on the device.
        derived: what the forward computes from parameters alone, which stays there, too.
    """

    def run(values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        staying = [*_state(parts), *(tensor for tensor in values.values() if tensor.requires_grad)]
        with offloaded.recording(staying, derived):
            return forward(values, micro_batch)

    return run


def _state(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    for part in parts:
        for tensor in (*parameters_of(part).values(), *buffers_of(part).values()):
            if isinstance(tensor, Tensor) and _is_dense(tensor):
                yield tensor
