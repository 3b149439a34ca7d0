"""Saving in the background: a thread writes a copy in the host's memory while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from lightning_gpp._compat.torch import pytree


class Saver:
    """Runs one writing at a time.

    Attributes:
        background: whether writing goes on in a thread; otherwise it ends before the next line of the program.
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self._writing: _Writing | None = None
        self._afterwards: list[Callable[[], None]] = []

    def staged(self, checkpoint: Any) -> Any:
        """The checkpoint as it is now, which nothing changes while it is written."""
        return on_host(checkpoint) if self.background else checkpoint

    def run(self, write: Callable[[], None]) -> None:
        """Write, after the end of the writing before. Its error is raised here."""
        self.wait()
        if not self.background:
            write()
            return
        self._writing = _Writing(write)
        self._writing.start()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run an action that may lose older checkpoints, after the current writing has succeeded."""
        if self._writing is None:
            action()
        else:
            self._afterwards.append(action)

    def wait(self) -> None:
        """Wait for the end of writing, and raise its error."""
        writing, self._writing = self._writing, None
        actions, self._afterwards = self._afterwards, []
        if writing is None:
            return
        writing.join()
        if writing.error is not None:
            raise writing.error
        for action in actions:
            action()


class _Writing(Thread):
    """A thread that ends with its process: what it has not written by then is missing, and the older one is whole."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._write = write
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error


def on_host(checkpoint: Any) -> Any:
    """A copy on the CPU, in which tensors that are the same one remain so."""
    copies: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(checkpoint):
        if isinstance(leaf, Tensor):
            value = leaf.detach()
            copies[id(leaf)] = torch.empty_like(value, device="cpu", requires_grad=False).copy_(value)
    return copy.deepcopy(checkpoint, copies)
