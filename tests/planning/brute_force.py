"""The best partition by trying all: the yardstick for the search."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from random import Random

from lightning_gpp.costs.roofline import Link
from lightning_gpp.graph import Affine
from lightning_gpp.planning.partition import Partition, Problem
from lightning_gpp.planning.units import Unit, UnitGraph, Value


def random_problem(seed: int, num_units: int, num_stages: int) -> Problem:
    """A random DAG with one sink, random seconds and bytes."""
    random = Random(seed)
    units = tuple(unit(random.uniform(0.1, 2.0)) for _ in range(num_units))
    readers: list[set[int]] = [set() for _ in range(num_units)]
    for dst in range(1, num_units):
        for src in random.sample(range(dst), k=min(dst, random.choice((0, 1, 1, 2)))):
            readers[src].add(dst)
    values = tuple(
        Value(src=src, dsts=tuple(sorted(dsts or {num_units - 1})), bytes=random.uniform(0, 30), num_directions=2)
        for src, dsts in enumerate(readers[:-1])
    )
    link = Link(latency=0.01, bytes_per_second=200.0)
    graph = UnitGraph(units=units, values=values)
    return Problem(units=graph, num_stages=num_stages, num_micro_batches=6, link=link)


def chain_problem(num_units: int, num_stages: int, num_micro_batches: int = 6) -> Problem:
    """Units of one second each, one after the other; a transfer costs its latency of 10 ms, once."""
    values = tuple(Value(src=i, dsts=(i + 1,), bytes=0, num_directions=1) for i in range(num_units - 1))
    return Problem(
        units=UnitGraph(units=tuple(unit(1.0) for _ in range(num_units)), values=values),
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        link=Link(latency=0.01),
    )


def unit(seconds: float) -> Unit:
    return Unit(
        modules=(),
        forward=seconds / 3,
        backward=2 * seconds / 3,
        flops=Affine(),
        activation_bytes=Affine(),
        parameter_bytes=0,
    )


def best_score(problem: Problem) -> float:
    return min(
        (Partition(problem, stages).score() for stages in labellings(len(problem.seconds), problem.num_stages)),
        default=inf,
    )


def labellings(num_units: int, num_stages: int) -> Iterator[list[int]]:
    """All ways to put units into exactly `num_stages` unnamed stages."""

    def extend(stages: list[int], used: int) -> Iterator[list[int]]:
        if len(stages) == num_units:
            if used == num_stages:
                yield list(stages)
            return
        if used + num_units - len(stages) < num_stages:
            return
        for stage in range(min(used + 1, num_stages)):
            yield from extend([*stages, stage], max(used, stage + 1))

    return extend([], 0)
