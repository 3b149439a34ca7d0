"""Data for loops that every rank runs: each pipeline's first rank loads them, the others get its mini-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from lightning_gpp.training.control import Control, Mirror
from lightning_gpp.training.data.loaders import data_parallel_world, read_in_world

_END: Final = object()
"""Comes after the last mini-batch."""


class MirroredLoader:
    """A data loader whose mini-batches, and random numbers, all ranks of a pipeline have alike.

    Args:
        loader: loads the data; iterated over on the first rank of the pipeline only.
        control: the side channel of this rank.
        mirror: gives mini-batches to the other ranks.
    """

    def __init__(self, loader: Iterable[Any], control: Control, mirror: Mirror) -> None:
        self.loader, self._control, self._mirror = loader, control, mirror

    def __len__(self) -> int:
        with data_parallel_world(self._control.mesh):
            return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        reads = self._control.runs_step
        batches = read_in_world(self.loader, self._control.mesh) if reads else iter(())
        while True:
            batch = next(batches, _END)
            if not self._control.share_flag(batch is not _END):
                return
            batch = self._mirror.tree(None if batch is _END else batch)
            self._mirror.streams()
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
