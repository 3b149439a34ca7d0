"""A table names the device that computes longest, and what the others wait for."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp import Options, initialize
from lightning_gpp.reports.ranks import MeasuredRanks, RankTimes, batch_rows, ranks_text
from lightning_gpp.training.stragglers import FEWEST
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
    measured = engine.measured_ranks
    return [*messages.texts, *(f"{row}" for row in (batch_rows(measured, 3) if measured else ()))]


def test_a_slow_rank_is_seen() -> None:
    told, *others = run_distributed(3, train, 1)
    (rows,) = (text.splitlines()[3:] for text in told if text.startswith(f"Devices in {FEWEST} mini-batches"))
    assert [re.search(r"rank 1: (gradients|tensors) of micro-batch \d", row) is not None for row in rows] == [1, 0, 1]
    assert [re.match(r"\['\d+', 'rank 1', ", row) is not None for row in told[-3:]] == [True] * 3
    assert not any("Devices" in text for texts in others for text in texts)


def noted(*computing: float) -> RankTimes:
    waits = ["rank 1: tensors"] * len(computing)
    return RankTimes(computing=computing, waiting=[0.5] * len(computing), longest=waits)


def test_the_table() -> None:
    lines = ranks_text(MeasuredRanks(first=0, ranks=[noted(1, 1, 3), noted(2, 2, 2)])).splitlines()
    assert lines[0] == "Devices in 3 mini-batches, medians:"
    assert [line.replace(" ", "") for line in lines[1::2]] == [
        "|rank|computes|waits|slowestin|waitslongestfor|",
        "|0|1s|500ms|33%|rank1:tensors|",
    ]


def test_each_mini_batch_has_its_slowest_rank_and_its_wait() -> None:
    measured = MeasuredRanks(first=500, ranks=[noted(1, 1, 3), noted(2, 2, 2)])
    assert batch_rows(measured, 2) == [
        ["501", "rank 1", "2 s", "1 s", "500 ms", "rank 1: tensors"],
        ["502", "rank 0", "3 s", "2 s", "500 ms", "rank 1: tensors"],
    ]
