"""Stragglers: how long devices compute in a mini-batch and for which messages they wait, from the executors' clocks.

A device that is slower than its plan (a throttled processor, another job, a slow disk) makes all others wait, and looks
as busy as it should. So devices compare their times now and then, and one that is slower than planned is named.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

from lightning_gpp.reports.ranks import MeasuredRanks, RankTimes, ranks_text, slowest
from lightning_gpp.reports.units import duration, percent
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.training.host import Job

log = logging.getLogger(__name__)

PERIOD: Final = 500
"""Mini-batches between two comparisons."""
FEWEST: Final = 20
"""Mini-batches that are enough for a comparison."""
SLOWER: Final = 1.5
"""A device is slow if it takes this many times as long as planned, compared with the other devices."""
OFTEN: Final = 0.8
"""Part of the mini-batches in which it must be the slowest."""

FOR_NOTHING: Final = -1
FOR_NUMBERS: Final = -2
"""In place of the position of an instruction: no wait, and that for the announcement of the mini-batch."""


class Stragglers:
    """Notes the mini-batches of training of this rank, and compares ranks.

    Args:
        job: the job of the run.
        planned: seconds that each device should compute, by its number in the pipeline; empty if unknown.
    """

    def __init__(self, job: Job, planned: Callable[[], Mapping[int, float]]) -> None:
        self._control, self._host, self._planned = job.control, job.host, planned
        self._blocks = job.device.type == "cpu"  # other devices work through a queue, so that waits take no time
        self._numbers = self._control.waited
        self.measured: MeasuredRanks | None = None
        """The mini-batches that were compared last, on global rank 0."""
        self._begin()

    def _begin(self) -> None:
        self._computing: list[float] = []
        self._waiting: list[float] = []
        self._longest: list[tuple[Executor, int]] = []

    def note(self, executor: Executor) -> None:
        """Note the mini-batch that ran last, and compare ranks now and then. All ranks call this for each."""
        if not self._blocks or self._control.world_size == 1:
            return
        total, longest, place = 0.0, 0.0, FOR_NOTHING
        for position, seconds in executor.waits:
            total += seconds
            if seconds > longest:
                longest, place = seconds, position
        numbers, self._numbers = self._control.waited - self._numbers, self._control.waited
        self._computing.append(executor.seconds - total)
        self._waiting.append(total + numbers)
        self._longest.append((executor, FOR_NUMBERS if numbers > longest else place))
        if len(self._computing) == PERIOD:
            self.compare()

    def _texts(self) -> list[str]:
        """The longest wait of this rank in each mini-batch, in words."""
        texts = {each: self._text(*each) for each in set(self._longest)}
        return [texts[each] for each in self._longest]

    def _text(self, executor: Executor, place: int) -> str:
        if place == FOR_NUMBERS:
            return f"rank {self._control.mesh.process(self._control.step_rank)}: the next mini-batch"
        wait = None if place == FOR_NOTHING else executor.wait_at(place)
        return "" if wait is None else wait.brief

    def compare(self, *, tell: bool = False) -> None:
        """Compare the mini-batches since the last comparison, if there are enough. All ranks call this together.

        Global rank 0 warns of a device that is slower than planned, and shows a table if the user is to be told.
        """
        if len(self._computing) >= FEWEST:
            mine = RankTimes(computing=self._computing, waiting=self._waiting, longest=self._texts())
            ranks: list[RankTimes] = self._control.gather_all(mine)
            if self._control.first:
                self.measured = MeasuredRanks(ranks=ranks)
                self._judge(ranks)
            self._begin()
        if tell and self.measured is not None:
            self._host.inform(ranks_text(self.measured))

    def _judge(self, ranks: Sequence[RankTimes]) -> None:
        planned = self._planned()
        expected = [planned.get(device, 0.0) for device in self._control.mesh.devices]
        if warning := slower_than_planned(ranks, expected):
            log.warning("%s", warning)


def slower_than_planned(ranks: Sequence[RankTimes], planned: Sequence[float]) -> str:
    """A warning about a rank that is often the slowest compared with its plan, and much slower; empty if none is."""
    if not all(planned):
        return ""
    rows = [[seconds / plan for seconds in each.computing] for each, plan in zip(ranks, planned, strict=True)]
    (rank, times), *_ = Counter(slowest(rows)).most_common(1)
    factor = median(rows[rank]) / median(median(row) for other, row in enumerate(rows) if other != rank)
    if times < OFTEN * len(rows[rank]) or factor < SLOWER:
        return ""
    return (
        f"Rank {rank} computes {factor:.1f} times as long as planned, compared with the other ranks "
        f"({duration(median(ranks[rank].computing))} per mini-batch in {len(rows[rank])} mini-batches), and was the "
        f"slowest in {percent(times / len(rows[rank]))} of them: the others wait for it. Look at its machine (other "
        "processes, throttling); if that is as it should be, plan with measured times (strategy.costs=measured)."
    )
