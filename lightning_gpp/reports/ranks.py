"""The ranks of a run: how long each computes in a mini-batch, which is the slowest, and for what it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_gpp.reports.tables import markdown
from lightning_gpp.reports.units import duration, percent

HEADER: Final = ("rank", "computes", "waits", "slowest in", "waits longest for")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The mini-batches of one rank: seconds of computing and of waiting, and the longest wait of each, in words."""

    computing: Sequence[float]
    waiting: Sequence[float]
    longest: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanks:
    """The same mini-batches on all ranks."""

    ranks: Sequence[RankTimes]

    @property
    def num_batches(self) -> int:
        """The number of mini-batches."""
        return len(self.ranks[0].computing) if self.ranks else 0


def slowest(rows: Sequence[Sequence[float]]) -> list[int]:
    """The rank with the largest figure, by mini-batch. `rows`: the figures of each rank."""
    return [max(range(len(rows)), key=figures.__getitem__) for figures in zip(*rows, strict=True)]


def _rows(measured: MeasuredRanks) -> list[list[str]]:
    times = Counter(slowest([each.computing for each in measured.ranks]))
    return [
        [
            str(rank),
            duration(median(each.computing)),
            duration(median(each.waiting)),
            percent(times[rank] / measured.num_batches),
            next((text for text, _ in Counter(filter(None, each.longest)).most_common(1)), "-"),
        ]
        for rank, each in enumerate(measured.ranks)
    ]


def ranks_text(measured: MeasuredRanks) -> str:
    """The table of the ranks for a terminal."""
    heading = f"Devices in {measured.num_batches} mini-batches, medians:"
    return f"{heading}\n{markdown(HEADER, _rows(measured))}"
