"""The mini-batch that comes next: its number of samples and its form, known to all ranks of a pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture.batch import batch_size_of
from lightning_gpp.training.batches import signature
from lightning_gpp.training.control import Control
from lightning_gpp.training.feed import Feed
from lightning_gpp.training.segments import Facts


class Incoming:
    """Tells the ranks of a pipeline which mini-batch comes.

    Attributes:
        batch_size: samples of the mini-batch that was announced last.
        form: a fingerprint of its structure, and of which parameters are trained.
        facts: of it, and of those mini-batches after it that are known.
        feed: tells how many mini-batches are announced before their turn; which, on the rank that runs the step.
        anew: whether the mini-batch that was announced last comes instead of others that were announced before.
    """

    def __init__(self, module: nn.Module, control: Control) -> None:
        self.module, self.control = module, control
        self.batch_size, self.form = 0, 0
        self.facts: list[Facts] = []
        self.feed = Feed()
        self.anew = False
        self.follow()

    def follow(self) -> None:
        """Take notice of the parameters that are in the module now, in the places of others."""
        self.parameters = list(self.module.parameters())

    @contextmanager
    def fed_by(self, feed: Feed) -> Iterator[None]:
        """Inside, mini-batches come from this feed."""
        before, self.feed = self.feed, feed
        try:
            yield
        finally:
            self.feed = before

    def announce(self, batch: Any, *, anew: bool = False) -> bool:
        """Share the facts of a mini-batch; False if it is None. The arguments count on the rank that runs the step.

        Args:
            batch: the mini-batch.
            anew: whether it comes instead of others that were announced before.
        """
        ahead = self.feed.ahead()
        numbers = torch.full((2 + ahead, 2), -1, dtype=torch.int64)
        if self.control.runs_step and batch is not None:
            for row, known in enumerate((batch, *self.feed.upcoming[:ahead])):
                numbers[row] = torch.tensor((batch_size_of(known), self.form_of(known)))
            numbers[-1, 0] = anew
        *rows, last = self.control.share(numbers).tolist()
        self.anew = last[0] == 1
        self.facts = [Facts(size, form) for size, form in rows if size >= 0]
        self.batch_size, self.form = rows[0]
        return bool(self.facts)

    def form_of(self, batch: Any) -> int:
        """Fingerprint of what a capture depends on: the batch's structure, and which parameters are trained."""
        return signature(batch) ^ (zlib.crc32(self.trained()) << 16)

    def trained(self) -> bytes:
        """For every parameter of the module 1 if it requires a gradient, else 0."""
        return bytes([parameter.requires_grad for parameter in self.parameters])

    def train_as(self, trained: bytes) -> None:
        """Let the parameters that are marked require a gradient, and no others."""
        for parameter, flag in zip(self.parameters, trained, strict=True):
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))
