"""Partitions of units by local search: from several first partitions, single units move while the step gets faster."""

from __future__ import annotations

from math import inf
from random import Random

from lightning_gpp.planning.partition import Partition, Problem
from lightning_gpp.planning.starts import starts

MAX_EVALUATIONS = 20_000
"""Of partitions, in one search. Counted instead of timed: the same model gives the same plan on every machine."""

KICKS = 40
"""How often the best partition is disturbed and improved again."""


def search(problem: Problem) -> Partition:
    """The best partition found; every stage has at least one unit, and stages form no cycle."""
    climb = _Climb(problem)
    for stages in starts(problem):
        climb.improve(Partition(problem, stages))
    random = Random(0)
    for _ in range(KICKS if problem.num_stages > 1 else 0):
        candidate = Partition(problem, climb.best)
        _kick(candidate, random)
        climb.improve(candidate)
    return Partition(problem, climb.best)


class _Climb:
    """Improves partitions and remembers the best one of all."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.evaluations = 0
        self.best: list[int] = []
        self.best_score = inf

    def improve(self, partition: Partition) -> None:
        score = partition.score()
        while self.evaluations < MAX_EVALUATIONS:
            better = self._pass(partition, score)
            if better >= score:
                break
            score = better
        if score < self.best_score or not self.best:
            self.best, self.best_score = list(partition.stage), score

    def _pass(self, partition: Partition, score: float) -> float:
        """Try to move every unit once; keep each move that makes the step faster by more than rounding errors."""
        for unit in range(len(partition.stage)):
            for stage in _targets(partition, unit):
                old = partition.stage[unit]
                partition.move(unit, stage)
                self.evaluations += 1
                moved = partition.score()
                if moved < score * (1 - 1e-9):
                    score = moved
                    break
                partition.move(unit, old)
        return score


def _targets(partition: Partition, unit: int) -> list[int]:
    """Stages worth trying for a unit: those of its neighbours, and the one with the least to compute."""
    home = partition.stage[unit]
    if partition.members[home] == 1:
        return []
    stages = {partition.stage[neighbour] for neighbour in partition.problem.neighbours[unit]}
    least = min(range(len(partition.compute)), key=partition.compute.__getitem__)
    return sorted((stages | {least}) - {home})


def _kick(partition: Partition, random: Random) -> None:
    for _ in range(3):
        unit = random.randrange(len(partition.stage))
        targets = _targets(partition, unit)
        if targets:
            old = partition.stage[unit]
            partition.move(unit, random.choice(targets))
            if partition.ways() is None:
                partition.move(unit, old)
