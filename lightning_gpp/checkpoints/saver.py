"""Saving in the background: a thread writes a copy in the host's memory while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
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
        self._writing: Future[None] | None = None
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
        self._writing = Future()
        # a thread that ends with its process: what it has not written by then is missing, and the older one is whole
        Thread(target=_complete, args=(self._writing, write), name="checkpoint", daemon=True).start()

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
        writing.result()
        for action in actions:
            action()


def _complete(future: Future[None], write: Callable[[], None]) -> None:
    try:
        write()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


def on_host(checkpoint: Any) -> Any:
    """A copy on the CPU, in which tensors that are the same one remain so."""
    copies: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(checkpoint):
        if isinstance(leaf, Tensor):
            value = leaf.detach()
            copies[id(leaf)] = torch.empty_like(value, device="cpu", requires_grad=False).copy_(value)
    return copy.deepcopy(checkpoint, copies)
