"""EdgePipe's partitioner against every choice of devices, their order and their units."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf
from random import Random

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.graph import Affine
from lightning_gpp.planning import Problem
from lightning_gpp.planning.partitioners.edgepipe import edgepipe
from lightning_gpp.planning.problem.partitioner import SearchControl
from lightning_gpp.planning.problem.units import UnitGraph, Value
from tests.planning.problems import DEVICE, problem_of

SPEEDS = (1.0, 2.0, 4.0)


def kind(speed: float, memory: float = 1e9) -> Device:
    flops = {"float32": speed * 1e9}
    return replace(DEVICE, name=f"speed {speed:g}, {memory:g} bytes", memory_bytes=memory, peak_flops=flops)


def random_problem(seed: int, *, chain: bool) -> Problem:
    """Up to two kinds with up to two hosts each and the one of the step, links of several speeds, little memory."""
    random = Random(seed)
    number = random.randint(2, 6)
    nodes = [
        Node(
            device=kind(random.choice(SPEEDS), random.choice((150.0, 300.0, 1e9))),
            count=random.randint(1, 2),
            link=Link(latency=random.choice((0, 0.1)), bytes_per_second=random.choice((5.0, 20.0, 1e3))),
        )
        for _ in range(random.randint(1, 3))
    ]
    between = Link(latency=random.choice((0, 0.2)), bytes_per_second=random.choice((3.0, 10.0, 1e3)))
    cluster = Cluster.of_nodes("edge", nodes, between)
    readers = [(unit + 1,) if chain else _readers(random, unit, number) for unit in range(number - 1)]
    problem = problem_of(random, number, list(enumerate(readers)), cluster)
    data = (Value(src=-1, dsts=(0,), bytes=Affine(random.uniform(0, 5))),) if random.random() < 0.5 else ()
    units = UnitGraph(units=problem.units.units, values=problem.units.values, data=data)
    recompute = random.choice((False, True))
    return replace(problem.on(units), cluster=cluster, sizes=problem.sizes[:2], recompute=recompute)


def _readers(random: Random, unit: int, number: int) -> tuple[int, ...]:
    later = range(unit + 1, number)
    return tuple(sorted(random.sample(later, k=min(len(later), random.choice((1, 1, 2))))))


def by_hand(problem: Problem) -> float:
    """The shortest period of all chains of convex sets of units on all orders of all choices of devices."""
    return min((_period(problem, stages, size) for size in problem.sizes for stages in _all(problem)), default=inf)


def _all(problem: Problem) -> list[list[tuple[set[int], int]]]:
    found = []
    for groups in _chains(problem, set(range(problem.num_units))):
        for devices in permutations(range(1, problem.num_devices), len(groups) - 1):
            found.append(list(zip(groups, (*devices, 0), strict=True)))
    return found


def _chains(problem: Problem, left: set[int]) -> list[list[set[int]]]:
    """All ways to divide the units that are left into first stage, second stage, and so on."""
    found = [[left]]
    for bits in range(1, (1 << len(left)) - 1):
        first = {unit for index, unit in enumerate(sorted(left)) if bits >> index & 1}
        if all(before in first or before not in left for unit in first for before in problem.order.predecessors(unit)):
            found += [[first, *rest] for rest in _chains(problem, left - first)]
    return found


def _period(problem: Problem, stages: list[tuple[set[int], int]], size: int) -> float:
    number = -(-problem.batch_size // size)
    slowest = 0.0
    for place, (units, device) in enumerate(stages):
        if not _fits(problem, units, device, size, min(number, len(stages) - place)):
            return inf
        seconds = problem.seconds(size, problem.cluster.kind(device))
        work = sum(seconds.total[unit] + (seconds.forward[unit] if problem.recompute else 0) for unit in units)
        data = sum(value.bytes.at(size) for value in problem.units.data if units & set(value.dsts))
        slowest = max(slowest, work, problem.cluster.link(0, device).seconds(data) if data and device else 0.0)
    for cut in range(1, len(stages)):
        slowest = max(slowest, _crossing(problem, stages, cut, size))
    return slowest * number


def _crossing(problem: Problem, stages: list[tuple[set[int], int]], cut: int, size: int) -> float:
    behind = set().union(*(units for units, _ in stages[cut:]))
    values = [v for v in problem.units.values if v.src not in behind and behind & set(v.dsts)]
    there = sum(value.bytes.at(size) for value in values)
    back = sum(value.bytes.at(size) for value in values if value.num_directions == 2)
    src, dst = stages[cut - 1][1], stages[cut][1]
    ways = ((problem.cluster.link(src, dst), there), (problem.cluster.link(dst, src), back))
    return max((link.seconds(size) for link, size in ways if size), default=0.0)


def _fits(problem: Problem, units: set[int], device: int, size: int, in_flight: int) -> bool:
    received = sum(v.bytes.at(size) for v in problem.units.values if v.src not in units and units & set(v.dsts))
    received += sum(v.bytes.at(size) for v in problem.units.data if units & set(v.dsts))
    sent = sum(v.bytes.at(size) for v in problem.units.values if v.src in units and set(v.dsts) - units)
    saved = sum(problem.saved_bytes(size)[unit] for unit in units)
    static = sum(problem.static_bytes[unit] for unit in units)
    held = in_flight * received + saved if problem.recompute else in_flight * saved
    return bool(static + held + 2 * (received + sent) <= problem.memory_bytes[device] * (1 + 1e-12))


def test_no_choice_of_devices_and_units_is_faster() -> None:
    unused = 0
    for seed in range(40):
        problem = random_problem(seed, chain=seed % 2 == 0)
        answer = edgepipe(problem, SearchControl(seconds=60))
        assert answer.objective == pytest.approx(by_hand(problem)), seed
        if answer.draft is not None:
            stages = [(set(stage.units), stage.devices[0]) for stage in answer.draft.stages]
            size = answer.draft.stages[0].micro_batch_size
            assert _period(problem, stages, size) == pytest.approx(answer.objective), seed
            unused += len(stages) < problem.num_devices
    assert unused
