"""Dynamic padding: most lengths of sequences need no capture, and train as in one process."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp.training import sessions
from lightning_gpp.training.data.lengths import corners_around, of_sizes
from tests.stages.test_sizes import Rounded, Text, Windowed, batch
from tests.strategy import harness

STAGES = {"words": 0, "places": 0, "mixed": 0, "head": 1}
LENGTHS = [6, 9, 7, 12, 8, 13, 9, 30, 21, 6]


class Trained(Text):
    batch = staticmethod(batch)

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class WindowedTrained(Windowed, Trained):
    """Sequences of more than eight words take another way."""


class RoundedTrained(Rounded, Trained):
    """Sequences are padded to a multiple of four."""


class PairedTrained(Trained):
    """Two sequences, whose lengths have nothing to do with each other."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hint = self.mixed(self.words(batch["hint"])).mean(1).sum(1)
        loss = super().training_step(batch, batch_idx)
        return loss + hint.square().mean()

    @staticmethod
    def batch(length: int) -> dict[str, Tensor]:
        return {**batch(length), "hint": batch(3 + length * 7 % 11)["ids"]}


def fit(rank: int, ranks: int, kind: type[Trained]) -> tuple[list[float], int]:
    """The losses of mini-batches of many lengths, and the number of captures after set-up."""
    module = kind().double()
    strategy = harness.strategy(stages=STAGES, num_pipelines=1) if ranks > 1 else "auto"
    data = DataLoader([kind.batch(length) for length in LENGTHS], batch_size=None)
    with mock.patch.object(sessions, "capture_of", wraps=sessions.capture_of) as captures:
        harness.trainer(strategy, devices=ranks, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    return module.losses, captures.call_count - 1  # without that of set-up


def train(rank: int, ranks: int) -> list[tuple[list[float], int]]:
    return [fit(rank, ranks, kind) for kind in (Trained, WindowedTrained, RoundedTrained, PairedTrained)]


def test_lengths_train_as_in_one_process_and_most_are_not_captured() -> None:
    (alone,), split = harness.run(1, train, 1), harness.run(2, train, 2)
    for rank in split:
        for (losses, _), (expected, _) in zip(rank, alone, strict=True):
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        plain, windowed, rounded, paired = (captures for _, captures in rank)
        assert plain <= 3  # of seven new lengths: two around the first ones, one around the longest
        assert paired <= 5
        assert windowed > plain
        assert rounded > plain


def test_sizes_that_are_equal_stay_equal_in_shorter_and_longer_mini_batches() -> None:
    shorter, longer, first_alone = corners_around((1, 12, 12, 30, 4), (1, 9, 9, 33, 4))
    assert shorter == (1, 2, 2, 7, 4)
    assert longer[1] == longer[2] >= 24
    assert longer[3] >= 66
    assert first_alone == (1, longer[1], longer[1], 30, 4)
    assert corners_around((5, 3), (5, 0)) == []  # nothing repeats
    assert math.gcd(12 - 2, longer[1] - 2) == math.gcd(30 - 7, longer[3] - 7) == 1


def test_a_longer_mini_batch_repeats_the_elements_of_a_shorter_one() -> None:
    batch = {"ids": torch.tensor([[3, 5], [7, 9]]), "mask": torch.ones(2, 2), "name": "text"}
    made = of_sizes(batch, (1, 2, 1, 2), (1, 3, 1, 3))
    assert made["ids"].tolist() == [[3, 5, 3], [7, 9, 7]]
    assert made["mask"].shape == (2, 3)
    assert made["name"] == "text"
