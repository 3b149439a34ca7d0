"""The ranks of a run: how long each computes in a mini-batch, which is the slowest, and for what it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_gpp.reports.table import markdown
from lightning_gpp.reports.units import duration, percent

HEADER: Final = ("rank", "computes", "waits", "slowest in", "waits longest for")
EACH_HEADER: Final = ("mini-batch", "slowest", "computes", "the others, median", "it waits", "longest for")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The mini-batches of one rank: seconds of computing and of waiting, and the longest wait of each, in words."""

    computing: Sequence[float]
    waiting: Sequence[float]
    longest: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanks:
    """The same mini-batches on all ranks. `first`: the number of the first one."""

    first: int
    ranks: Sequence[RankTimes]

    @property
    def num_batches(self) -> int:
        """The number of mini-batches."""
        return len(self.ranks[0].computing) if self.ranks else 0


def slowest(rows: Sequence[Sequence[float]]) -> list[int]:
    """The rank with the largest figure, by mini-batch. `rows`: the figures of each rank."""
    return [max(range(len(rows)), key=figures.__getitem__) for figures in zip(*rows, strict=True)]


def rank_rows(measured: MeasuredRanks) -> list[list[str]]:
    """A row per rank, with medians."""
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


def batch_rows(measured: MeasuredRanks, most: int) -> list[list[str]]:
    """A row for each of the latest mini-batches: the slowest rank, and what it waited for."""
    computing = [each.computing for each in measured.ranks]
    rows = []
    for index, rank in list(enumerate(slowest(computing)))[-most:]:
        one, others = measured.ranks[rank], [row[index] for other, row in enumerate(computing) if other != rank]
        times = [duration(seconds) for seconds in (one.computing[index], median(others), one.waiting[index])]
        rows.append([str(measured.first + index), f"rank {rank}", *times, one.longest[index] or "-"])
    return rows


def ranks_text(measured: MeasuredRanks) -> str:
    """The table of the ranks for a terminal."""
    heading = f"Devices in {measured.num_batches} mini-batches, medians:"
    return "\n".join([heading, *markdown(HEADER, rank_rows(measured))])
