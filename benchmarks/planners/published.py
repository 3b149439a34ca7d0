"""The chain planners' recurrences as published: plain loops, one transition at a time.

Tables of costs, tie-breaks, and the use of the solution are those of the package's `pipedream` and `piper`, so all
answers are the same. numpy makes the tables before the loops, so a transition is only two comparisons: a planner that
computes a stage's costs whenever it tries it takes longer.
"""

from __future__ import annotations

from lightning_gpp.planning import Answer, Problem, SearchControl
from lightning_gpp.planning.partitioners import pipedream, piper
from lightning_gpp.planning.partitioners.downset_search import DownsetSearch
from lightning_gpp.planning.problem.problem import Array


def pipedream_in_loops(problem: Problem, control: SearchControl) -> Answer:
    """PipeDream's answer."""
    return pipedream.search(problem, control, LoopLevel)


def piper_in_loops(problem: Problem, control: SearchControl) -> Answer:
    """Piper's answer."""
    return piper.search(problem, control, LoopDownsets)


class LoopLevel(pipedream.HierarchyLevel):
    """Fills all cells of A[., ., number] for a last stage on `last` groups."""

    def extend(self, number: int, last: int, seconds: Array, starts: range) -> None:
        stages, num_units = seconds.T.tolist(), self.spans.num_units
        for start in starts:
            before = self.best[number - last, start].tolist()
            least_of = self.best[number, start].tolist()
            for stop in range(start + 2, num_units + 1):
                least, chosen = least_of[stop], -1
                tried = zip(before[start + 1 : stop], stages[stop][start + 1 : stop], strict=True)
                for cut, (earlier, stage) in enumerate(tried, start + 1):
                    if earlier < least and stage < least:
                        least, chosen = earlier if earlier > stage else stage, cut
                if chosen >= 0:
                    self.best[number, start, stop] = least
                    self.cut[number, start, stop] = chosen
                    self.share[number, start, stop] = last


class LoopDownsets(DownsetSearch):
    """Fills A[D, .] for first stages with one number of replicas."""

    def extend(self, row: Array, before: Array, seconds: Array) -> None:
        least, width = row.tolist(), before.shape[1]
        for later, stages in zip(before.tolist(), seconds.tolist(), strict=True):
            for devices, stage in enumerate(stages * width if len(stages) < width else stages):
                tried = later[devices]
                if tried < least[devices] and stage < least[devices]:
                    least[devices] = tried if tried > stage else stage
        row[:] = least
