"""Measures the memory that autograd keeps."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class SavedBytes:
    """Counts the bytes of all tensors that autograd keeps for backwards: shared memory once, parameters not at all.

    These are a plan's activation bytes. Tensors in transit between processes, temporary results inside operators, and
    memory reserved by the allocator do not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._users: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Held:
        held, storage = Held(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._enter(storage.data_ptr(), storage.nbytes())
            weakref.finalize(held, self._leave, storage.data_ptr())
        return held

    def _enter(self, pointer: int, size: int) -> None:
        self._users[pointer] = self._users.get(pointer, 0) + 1
        if self._users[pointer] == 1:
            self._bytes[pointer] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def _leave(self, pointer: int) -> None:
        self._users[pointer] -= 1
        if not self._users[pointer]:
            self.now -= self._bytes.pop(pointer)
            del self._users[pointer]


class Held:
    """A saved tensor whose release is recorded."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
