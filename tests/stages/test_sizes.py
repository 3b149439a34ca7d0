"""Pipelines of other lengths: made from those of captured lengths, they compute what a capture would."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpp.capture import capture_step
from lightning_gpp.stages import Pipeline, build
from lightning_gpp.stages.sizes import are_alike, may_be_resized, numbers_of, resized
from tests.stages.inprocess import chain_of, split_gradients, whole_gradients

WIDTH, WORDS = 4, 11


class Text(pl.LightningModule):
    """Positions, folded rows, and a target that is one word shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.mixed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        samples, length = ids.shape
        h = self.words(ids) + self.places(torch.arange(length))
        h = self.mixed(h.reshape(samples * length, WIDTH)).view(samples, length, WIDTH)
        return self.head(self.seen(h).tanh()[:, : length - 1])

    def seen(self, h: Tensor) -> Tensor:
        return h

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["ids"][:, 1:].flatten())


class Windowed(Text):
    """Takes another way for long sequences."""

    def seen(self, h: Tensor) -> Tensor:
        return h - h.roll(8, 1) if h.shape[1] > 8 else h


class Rounded(Text):
    """Pads to a multiple of four."""

    def seen(self, h: Tensor) -> Tensor:
        return F.pad(h, (0, 0, 0, -h.shape[1] % 4))


def batch(length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, WORDS, (4, length), generator=torch.Generator().manual_seed(length))}


def pipeline(module: Text, length: int) -> tuple[Pipeline, Any]:
    captured = capture_step(module, batch(length))
    plan = chain_of(captured, [["words", "places", "mixed"], ["head"]])
    return build(captured, plan, module), plan


def test_a_pipeline_of_a_third_length_trains_as_one_process() -> None:
    torch.manual_seed(0)
    module = Text().double()
    (short, _), (long, plan), (known, _) = (pipeline(module, length) for length in (5, 17, 9))
    assert may_be_resized(short)
    assert are_alike(short, long)
    between = np.array(numbers_of(short)) + (np.array(numbers_of(long)) - numbers_of(short)) / 3
    assert between.tolist() == numbers_of(known)
    made = resized(short, map(int, between))
    loss, reference = whole_gradients(module, plan, batch(9))
    assert split_gradients(module, made, plan, batch(9)) == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_pipelines_that_take_another_way_are_not_alike() -> None:
    module = Windowed()
    short, middle, long = (pipeline(module, length)[0] for length in (4, 8, 9))
    assert are_alike(short, middle)
    assert not are_alike(short, long)


def test_what_is_rounded_up_lies_on_no_line() -> None:
    first, second, third = (np.array(numbers_of(pipeline(Rounded(), length)[0])) for length in (5, 7, 9))
    assert not np.array_equal(third - second, second - first)
