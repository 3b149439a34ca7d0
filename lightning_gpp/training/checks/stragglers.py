"""Stragglers: how long devices compute in a mini-batch and for which messages they wait, from the executors' clocks.

A device that is slow (a throttled processor, another job, a slow disk) makes all others wait, and looks as busy as it
should. So at the end of a run a table has the times of all devices.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from lightning_gpp.reports.ranks import MeasuredRanks, RankTimes, ranks_text
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.training.host import Job

MOST: Final = 500
"""Mini-batches that are compared: the last ones."""
FEWEST: Final = 20
"""Mini-batches that are enough for a comparison."""

FOR_NOTHING: Final = -1
FOR_NUMBERS: Final = -2
"""In place of the position of an instruction: no wait, and that for the announcement of the mini-batch."""


class Stragglers:
    """Notes the mini-batches of training of this rank, and compares ranks at the end of the run."""

    def __init__(self, job: Job) -> None:
        self._control, self._host = job.control, job.host
        self._blocks = job.device.type == "cpu"  # other devices work through a queue, so that waits take no time
        self._numbers = self._control.waited
        self._noted: deque[tuple[float, float, Executor, int]] = deque(maxlen=MOST)
        """Seconds of computing and of waiting in a mini-batch, and the instruction of the longest wait."""
        self.measured: MeasuredRanks | None = None
        """The mini-batches that were compared, on global rank 0."""

    def note(self, executor: Executor) -> None:
        """Note the mini-batch that ran last."""
        if not self._blocks or self._control.world_size == 1:
            return
        total, longest, place = 0.0, 0.0, FOR_NOTHING
        for position, seconds in executor.waits:
            total += seconds
            if seconds > longest:
                longest, place = seconds, position
        numbers, self._numbers = self._control.waited - self._numbers, self._control.waited
        place = FOR_NUMBERS if numbers > longest else place
        self._noted.append((executor.seconds - total, total + numbers, executor, place))

    def _text(self, executor: Executor, place: int) -> str:
        """A wait in words."""
        if place == FOR_NUMBERS:
            return f"rank {self._control.mesh.process(self._control.step_rank)}: the next mini-batch"
        wait = None if place == FOR_NOTHING else executor.wait_at(place)
        return "" if wait is None else wait.brief

    def compare(self) -> None:
        """Compare the last mini-batches, if there are enough, and show a table. All ranks call this together."""
        if len(self._noted) < FEWEST:
            return
        texts = {each: self._text(*each) for each in {(executor, place) for _, _, executor, place in self._noted}}
        mine = RankTimes(
            computing=[computing for computing, *_ in self._noted],
            waiting=[waiting for _, waiting, *_ in self._noted],
            longest=[texts[executor, place] for *_, executor, place in self._noted],
        )
        ranks: list[RankTimes] = self._control.gather_all(mine)
        if self._control.first:
            self.measured = MeasuredRanks(ranks=ranks)
            self._host.inform(ranks_text(self.measured))
