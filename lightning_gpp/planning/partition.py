"""A partition of units into stages, with its estimated step time kept up to date under moves of single units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from lightning_gpp.costs.roofline import Link
from lightning_gpp.planning.units import UnitGraph

SMOOTHING = 0.01
"""Weight of the spread of stage times: it leads a search across moves that do not change the slowest stage."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A value as the search sees it: the reading units, the seconds it takes, and how often it travels (1 or 2)."""

    src: int
    dsts: tuple[int, ...]
    seconds: float
    num_directions: int


@dataclass(slots=True, kw_only=True)
class Problem:
    """Units to be cut into `num_stages`, each on a device of its own, for `num_micro_batches` per step."""

    units: UnitGraph
    num_stages: int
    num_micro_batches: int
    link: Link
    seconds: list[float] = field(init=False)
    flows: list[Flow] = field(init=False)
    made: list[list[int]] = field(init=False)
    read: list[list[int]] = field(init=False)
    neighbours: list[set[int]] = field(init=False)

    def __post_init__(self) -> None:
        values, number = self.units.values, range(len(self.units.units))
        self.seconds = [unit.seconds for unit in self.units.units]
        self.flows = [
            Flow(
                value.src,
                value.dsts,
                value.bytes * value.num_directions / self.link.bytes_per_second,
                value.num_directions,
            )
            for value in values
        ]
        self.made = [[] for _ in number]
        self.read = [[] for _ in number]
        for index, value in enumerate(values):
            self.made[value.src].append(index)
            for unit in value.dsts:
                self.read[unit].append(index)
        self.neighbours = [self._neighbours(unit) for unit in number]

    def _neighbours(self, unit: int) -> set[int]:
        readers = {dst for index in self.made[unit] for dst in self.flows[index].dsts}
        return readers | {self.flows[index].src for index in self.read[unit]}


class Partition:
    """Stage numbers of all units; a move costs time that grows with the unit's values, not with the number of units."""

    def __init__(self, problem: Problem, stages: Sequence[int]) -> None:
        self.problem = problem
        self.stage = list(stages)
        self.members = Counter(stages)
        self.compute = [0.0] * problem.num_stages
        self.readers: list[Counter[int]] = [Counter() for _ in problem.flows]
        self.edges: dict[tuple[int, int], list[float]] = {}
        for unit, stage in enumerate(stages):
            self.compute[stage] += problem.seconds[unit]
        for index, flow in enumerate(problem.flows):
            self.readers[index].update(stages[unit] for unit in flow.dsts)
            self._flow(index, self.stage[flow.src], 1)

    def move(self, unit: int, stage: int) -> None:
        """Put a unit into another stage; the result may have cycles, which `score` tells."""
        old = self.stage[unit]
        self.compute[old] -= self.problem.seconds[unit]
        self.compute[stage] += self.problem.seconds[unit]
        self.members[old] -= 1
        self.members[stage] += 1
        touched = {*self.problem.made[unit], *self.problem.read[unit]}
        for index in touched:
            self._flow(index, self.stage[self.problem.flows[index].src], -1)
        self.stage[unit] = stage
        for index in self.problem.read[unit]:
            self.readers[index][old] -= 1
            self.readers[index][stage] += 1
        for index in touched:
            self._flow(index, self.stage[self.problem.flows[index].src], 1)

    def _flow(self, index: int, src: int, sign: int) -> None:
        """Add (1) or take away (-1) what a value contributes to the edges of the stage graph."""
        flow = self.problem.flows[index]
        for dst, count in self.readers[index].items():
            if count and dst != src:
                edge = self.edges.setdefault((src, dst), [0.0, 0, 0])
                edge[0] += sign * flow.seconds
                edge[1] += sign
                edge[2] += sign * (flow.num_directions - 1)
                if not edge[1]:
                    del self.edges[src, dst]

    def score(self) -> float:
        """Estimated seconds of a step; infinite where the stages form a cycle.

        The first micro-batch passes the longest path of the stage graph, with its transfers. Each further one takes
        as long as the slowest stage, which computes and moves bytes, or as long as one of the micro-batches in flight
        takes its turn: a stage at depth d has d of them, and waits for the longest way to the sink and back. In a
        chain of n equal stages with M micro-batches and free communication this is the known (M + n - 1) times a
        stage's forward and backward.
        """
        times = list(self.compute)
        for (src, dst), (seconds, _, _) in self.edges.items():
            times[src] += seconds
            times[dst] += seconds
        ways = self.ways()
        if ways is None:
            return inf
        spread = sqrt(sum(time * time for time in times) / len(times))
        period = max(max(times), max(seconds / depth for seconds, depth in ways))
        return max(ways)[0] + (self.problem.num_micro_batches - 1) * (period + SMOOTHING * spread)

    def ways(self) -> list[tuple[float, int]] | None:
        """For every stage the seconds of the slowest way of a micro-batch to the sink and back, itself included, and
        its depth: the most stages on such a way. None where the stages form a cycle.
        """
        num_stages = len(self.compute)
        before: list[list[tuple[int, float]]] = [[] for _ in range(num_stages)]
        waiting = [0] * num_stages
        for (src, dst), (seconds, _, backward) in self.edges.items():
            before[dst].append((src, seconds + self.problem.link.latency * (2 if backward else 1)))
            waiting[src] += 1
        behind, depth = [0.0] * num_stages, [1] * num_stages
        ready = [stage for stage, count in enumerate(waiting) if not count]
        for stage in ready:
            behind[stage] += self.compute[stage]
            for src, seconds in before[stage]:
                behind[src] = max(behind[src], behind[stage] + seconds)
                depth[src] = max(depth[src], depth[stage] + 1)
                waiting[src] -= 1
                if not waiting[src]:
                    ready.append(src)
        return list(zip(behind, depth, strict=True)) if len(ready) == num_stages else None

    @property
    def bottleneck(self) -> float:
        """Computing seconds of the slowest stage."""
        return max(self.compute)
