"""What was built for a check is gone with it: no cycle keeps parameters until Python's collector looks for some."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from tests.stages.inprocess import chain_of, split_gradients


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(torch.cat([self.left(batch), self.right(batch)], dim=1)).square().mean()


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_stages_and_their_gradients_are_gone_at_once() -> None:
    batch, module = torch.randn(8, 4), Towers()
    captured = capture_step(Towers(), batch)
    split_gradients(module, captured, chain_of(captured, [["left"], ["right"], ["head"]], 4), batch)
    tensors = [weakref.ref(each) for parameter in module.parameters() for each in (parameter, parameter.grad)]
    assert len(tensors) == 12
    del module
    assert not any(reference() is not None for reference in tensors)


class Head(nn.Linear):
    """Counts the inputs of earlier micro-batches that are still in memory."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(reference() is not None for reference in self.seen))
        self.seen.append(weakref.ref(x))
        return super().forward(x)


class Chain(nn.Module):
    """Returns its loss and another tensor in this kind of mapping."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.tower, self.head, self.kind = nn.Linear(4, 4), Head(), kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        found = self.head(self.tower(batch))
        return self.kind({"loss": found.square().mean(), "found": found})


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_micro_batch_is_gone_after_its_backward_and_only_what_the_step_returned_is_kept(kind: type) -> None:
    batch, module = torch.randn(32, 4), Chain(kind)
    captured = capture_step(Chain(kind), batch)
    split_gradients(module, captured, chain_of(captured, [["tower"], ["head"]], 4), batch)
    assert len(module.head.alive) == 8
    assert max(module.head.alive) <= 1
