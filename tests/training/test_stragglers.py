"""A table names the device that computes longest, and what the others wait for."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp import Options, initialize
from lightning_gpp.reports.ranks import MeasuredRanks, RankTimes, ranks_text
from lightning_gpp.training.checks.stragglers import FEWEST
from tests.distributed import run_distributed

STAGES = {"first": 0, "second": 1, "third": 2}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Slow(nn.Module):
    """A layer that takes longer on a chosen rank than anybody could know."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(64, 64), slow

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and self.slow:
            time.sleep(0.02)
        return self.linear(x)


def train(rank: int, slow: int) -> list[str]:
    messages = Messages()
    logging.getLogger("lightning_gpp").addHandler(messages)
    logging.getLogger("lightning_gpp").setLevel(logging.INFO)
    torch.manual_seed(1)
    model = nn.Sequential()
    for name in STAGES:
        model.add_module(name, Slow(slow == rank))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 64)
    step: Any = lambda module, batch: module(batch).square().mean()  # noqa: E731
    options = Options(stages=STAGES, num_micro_batches=2, self_check=False)
    with initialize(model, optimizer, batch, step=step, options=options) as engine:
        for _ in range(FEWEST):
            engine.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
    return messages.texts


def test_a_slow_rank_is_seen() -> None:
    told, *others = run_distributed(3, train, 1)
    (rows,) = (text.splitlines()[3:] for text in told if text.startswith(f"Devices in {FEWEST} mini-batches"))
    assert [re.search(r"rank 1: (gradients|tensors) of micro-batch \d", row) is not None for row in rows] == [1, 0, 1]
    assert not any("Devices" in text for texts in others for text in texts)


def noted(*computing: float) -> RankTimes:
    waits = ["rank 1: tensors"] * len(computing)
    return RankTimes(computing=computing, waiting=[0.5] * len(computing), longest=waits)


def test_the_table() -> None:
    lines = ranks_text(MeasuredRanks(ranks=[noted(1, 1, 3), noted(2, 2, 2)])).splitlines()
    assert lines[0] == "Devices in 3 mini-batches, medians:"
    assert [line.replace(" ", "") for line in lines[1::2]] == [
        "|rank|computes|waits|slowestin|waitslongestfor|",
        "|0|1s|500ms|33%|rank1:tensors|",
    ]
