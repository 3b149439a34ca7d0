"""Dynamic padding: most lengths of sequences need no capture, and train as in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp.training import sessions
from tests.stages.test_sizes import Rounded, Text, Windowed, batch
from tests.strategy import harness

STAGES = {"words": 0, "places": 0, "mixed": 0, "head": 1}
LENGTHS = [6, 9, 7, 12, 8, 13, 9, 30, 21, 6]


class Trained(Text):
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


def fit(rank: int, ranks: int, kind: type[Trained]) -> tuple[list[float], int]:
    """The losses of mini-batches of many lengths, and the number of captures after set-up."""
    module = kind().double()
    strategy = harness.strategy(stages=STAGES, num_pipelines=1) if ranks > 1 else "auto"
    data = DataLoader([batch(length) for length in LENGTHS], batch_size=None)
    with mock.patch.object(sessions, "capture_of", wraps=sessions.capture_of) as captures:
        harness.trainer(strategy, devices=ranks, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    return module.losses, captures.call_count - 1  # without that of set-up


def train(rank: int, ranks: int) -> list[tuple[list[float], int]]:
    return [fit(rank, ranks, kind) for kind in (Trained, WindowedTrained, RoundedTrained)]


def test_lengths_train_as_in_one_process_and_most_are_not_captured() -> None:
    (alone,), split = harness.run(1, train, 1), harness.run(2, train, 2)
    for rank in split:
        for (losses, _), (expected, _) in zip(rank, alone, strict=True):
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        plain, windowed, rounded = (captures for _, captures in rank)
        assert plain <= 5  # of seven new lengths
        assert windowed > plain
        assert rounded > plain
