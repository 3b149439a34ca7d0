"""The choice of what a stage recomputes: as little time as its memory allows.

Every block that is recomputed takes its forward once more per micro-batch, and frees what autograd would save inside
for each micro-batch in flight; one block at a time is there in full. So this is a knapsack: the blocks that are kept
are those that save most time per byte (AdaPipe, ASPLOS 2024, with blocks as computation units). If all blocks free too
little, the stage as a whole keeps only what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array, BlockFigures, Problem

Recompute: TypeAlias = bool | tuple[str, ...]
"""See `plan.Stage.recompute`."""

MAX_TRIED: Final = 10
"""Most blocks of a stage for which all sets are tried; of more, blocks are taken by the time that a byte costs."""


class StageMemory(NamedTuple):
    """Bytes that a stage replica needs beyond its room if nothing is recomputed, and if it runs again as a whole.

    `rerun_excess`: infinite if the stage may not run again. `in_flight`: its micro-batches.
    """

    excess: float
    rerun_excess: float
    in_flight: int


@dataclass(slots=True, eq=False)
class Recomputation:
    """Chooses for the stages of one problem."""

    problem: Problem
    _inside: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)

    def blocks(self, units: tuple[int, ...]) -> NDArray[np.int64]:
        """Numbers of the blocks that a stage of these units calls as a whole."""
        if units not in self._inside:
            mine = set(units)
            found = [number for number, needed in enumerate(self.problem.units_of_blocks) if needed <= mine]
            self._inside[units] = np.array(found, dtype=np.int64)
        return self._inside[units]

    def cheapest(self, units: tuple[int, ...], memory: StageMemory, figures: BlockFigures) -> Recompute:
        """The recomputation that makes a stage fit in the least time; that with the least memory if none does."""
        if memory.excess <= 0:
            return False
        numbers = self.blocks(units)
        chosen = _cover(memory, figures.of(numbers))
        if chosen is not None:
            return self._paths(numbers[chosen])
        least = memory.excess - _most_freed(memory, figures.of(numbers))
        if memory.rerun_excess <= 0 or memory.rerun_excess < least:
            return True
        return self._paths(numbers)

    def _paths(self, numbers: Sequence[int] | NDArray[np.int64]) -> Recompute:
        return tuple(self.problem.blocks[number].path for number in sorted(numbers)) or False


def _most_freed(memory: StageMemory, blocks: BlockFigures) -> float:
    return memory.in_flight * float(blocks.freed.sum()) - float(blocks.saved.max(initial=0.0))


def _cover(memory: StageMemory, blocks: BlockFigures) -> NDArray[np.int64] | None:
    """The blocks that take least time and free enough; None if all of them do not.

    The largest block is there in full while it runs again; so each size is tried as the largest.
    """
    best, seconds = None, np.inf
    for largest in np.unique(blocks.saved):
        allowed = np.flatnonzero(blocks.saved <= largest)
        needed = (memory.excess + float(largest)) / memory.in_flight
        if float(blocks.freed[allowed].sum()) < needed:
            continue
        taken = allowed[_least(blocks.seconds[allowed], blocks.freed[allowed], needed)]
        total = float(blocks.seconds[taken].sum())
        if total < seconds:
            best, seconds = taken, total
    return best


def _least(seconds: Array, freed: Array, needed: float) -> NDArray[np.int64]:
    """Positions of the entries with the fewest seconds that free the bytes needed."""
    if len(seconds) <= MAX_TRIED:
        sets = (np.arange(1 << len(seconds))[:, None] >> np.arange(len(seconds))) & 1
        enough = sets @ freed >= needed
        totals: Array = np.where(enough, sets @ seconds, np.inf)
        return np.flatnonzero(sets[int(totals.argmin())])
    order = np.argsort(seconds / freed, kind="stable")
    number = int(np.searchsorted(np.cumsum(freed[order]), needed)) + 1
    taken = order[:number]
    spare = float(freed[taken].sum()) - needed
    keep = np.ones(len(taken), dtype=bool)
    for position in np.argsort(-seconds[taken], kind="stable"):  # without those that turn out not to be needed
        if freed[taken[position]] <= spare:
            keep[position], spare = False, spare - float(freed[taken[position]])
    return taken[keep]
