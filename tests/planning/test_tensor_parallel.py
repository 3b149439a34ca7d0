"""Plans whose stages have different numbers of processes per device: against all such plans, and with one number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.errors import GPPError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Problem, Request
from lightning_gpp.planning.problem.draft import aligned
from lightning_gpp.planning.problem.prediction import simulated
from lightning_gpp.planning.tensor_parallel import SizesFound, best_sizes
from tests.planning.brute_force import partitions, with_slack
from tests.planning.graphs import Builder

EQUAL = 1 + 1e-6
DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e10)


def random_case(seed: int) -> tuple[OperatorGraph, Request]:
    """A chain or two branches of which most modules can be divided, on four devices, often with little memory."""
    random = Random(seed)
    graph = _random_graph(random, random.randint(2, 4))
    link = Link(latency=random.choice((1e-6, 1e-4)), bytes_per_second=random.choice((1e6, 1e7, 1e9)))
    cluster = Cluster.uniform(DEVICE, 4, link)
    if random.random() < 0.3:
        far = Link(latency=2 * link.latency, bytes_per_second=link.bytes_per_second / 2)
        cluster = Cluster.of_nodes("two nodes", [Node(device=DEVICE, count=2, link=link)] * 2, far)
    request = Request(
        cluster=cluster,
        batch_size=8,
        num_micro_batches=random.choice((2, 4)),
        num_pipelines=1,
        recompute=False,
        simplicity=0.0,
        seconds=30.0,
    )
    return graph, _tight(random, graph, request) if random.random() < 0.7 else request


def _random_graph(random: Random, number: int) -> OperatorGraph:
    build, results = Builder(), list[str]()
    for index in range(number):
        inputs = [results[-1]] if results and random.random() < 0.8 else [build.data()]
        inputs = results[-2:] if index == number - 1 and results else inputs
        results.append(build.linear(f"m{index}", *inputs, work=random.choice((1, 2, 10)) * random.uniform(0.5, 2.0)))
    graph = build.step(results[-1])
    names = [name for name in graph.parameter_sizes if random.random() < 0.8]
    return replace(graph, divided={name: random.randint(0, 1) for name in names})


def _tight(random: Random, graph: OperatorGraph, request: Request) -> Request:
    """The request with memory for a part of what the largest module needs, or for a little more."""
    problem = request.problem(graph)
    memory = random.uniform(0.4, 1.3) * float(problem.static_bytes.max())
    devices = tuple(replace(device, memory_bytes=memory) for device in request.cluster.devices)
    return replace(request, cluster=replace(request.cluster, devices=devices))


def found(graph: OperatorGraph, request: Request) -> SizesFound | None:
    try:
        return best_sizes("auto", request, dict.fromkeys((1, 2, 4), graph))
    except PlanError:
        return None


def optimum(problem: Problem) -> float:
    """The most samples per second of all plans that fit; 0 if there is none."""
    best = 0.0
    for draft in drafts(problem):
        for slackened in with_slack(problem, draft):
            try:
                prediction = simulated(problem, slackened)
            except GPPError:
                break  # values that replicas cannot share
            if prediction.fits:
                best = max(best, prediction.samples_per_second)
    return best


def drafts(problem: Problem) -> Iterator[Draft]:
    """All groups of units, orders of them on the devices, replicas and members."""
    for groups in partitions(problem):
        last = next(index for index, group in enumerate(groups) if problem.num_units - 1 in group)
        ordered = [*(group for index, group in enumerate(groups) if index != last), groups[last]]
        for ways in product(_ways(problem), repeat=len(groups)):
            if sum(count * members for count, members in ways) == problem.num_devices:
                devices = aligned(*zip(*ways, strict=True))
                stages = zip(ordered, devices, ways, strict=True)
                if all(problem.placeable(where, members) for _, where, (_, members) in stages):
                    yield _draft(problem, ordered, devices, ways)


def _ways(problem: Problem) -> list[tuple[int, int]]:
    """Numbers of replicas and of members."""
    number = problem.num_devices
    return [(count, members) for members in (1, 2, 4) for count in range(1, number // members + 1)]


def _draft(
    problem: Problem, groups: list[tuple[int, ...]], devices: list[tuple[int, ...]], ways: tuple[tuple[int, int], ...]
) -> Draft:
    stages = zip(groups, devices, ways, strict=True)
    size = problem.sizes[0]
    return Draft(
        stages=tuple(
            DraftStage(units=units, devices=where, micro_batch_size=size, members=members, recompute=False)
            for units, where, (_, members) in stages
        )
    )


def ratio_of(seed: int) -> float:
    """Time of the plan found, relative to the best one. Neither is faster than the bound, nor a single number."""
    graph, request = random_case(seed)
    best = optimum(replace(request, members=(1, 2, 4)).problem(graph))
    answer = found(graph, request)
    if answer is None or not best:
        assert (answer is None) == (not best), seed
        return 1.0
    assert answer.prediction.fits
    assert answer.prediction.lower_bound * best <= request.batch_size * EQUAL, seed
    rates = [plan.samples_per_second for plan in answer.plans.values()]
    assert answer.prediction.samples_per_second >= max(rates, default=0.0)
    return best / answer.prediction.samples_per_second


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_is_optimal(seed: int) -> None:
    assert ratio_of(seed) <= EQUAL


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
def test_200_problems() -> None:
    """At least 98 % are optimal, none is more than 5 % slower than the best."""
    ratios = [ratio_of(seed) for seed in range(200)]
    assert max(ratios) <= 1.05
    assert sum(ratio <= EQUAL for ratio in ratios) >= 0.98 * len(ratios)


# -- single properties ------------------------------------------------------------------------------------------------


def chain(*work: float) -> OperatorGraph:
    """Layers of these sizes, all of which members divide."""
    build = Builder()
    x = build.data()
    for index, size in enumerate(work):
        x = build.linear(f"m{index}", x, work=size)
    graph = build.step(x)
    return replace(graph, divided=dict.fromkeys(graph.parameter_sizes, 0))


def request(num_devices: int, memory_bytes: float = 1e9, **settings: Any) -> Request:
    device = replace(DEVICE, memory_bytes=memory_bytes)
    cluster = Cluster.uniform(device, num_devices, Link(latency=1e-6, bytes_per_second=1e8, shared="device"))
    return Request(cluster=cluster, **{"batch_size": 16, "num_pipelines": 1, "seconds": 3.0, **settings})


def test_only_the_layer_that_is_too_large_for_one_device_is_divided() -> None:
    """The second layer takes 0.66 MB with its gradient and Adam's state. With groups for all stages the others, which
    nothing divides, would be computed twice.
    """
    graph = replace(chain(3, 10, 3, 3), divided={"m1.weight": 0})
    found = best_sizes("auto", request(4, 0.6e6, recompute=False), dict.fromkeys((1, 2, 4), graph))
    plan = found.prediction.plan
    assert 1 in found.failures
    assert {stage.modules[0]: stage.tensor_parallel_size for stage in plan.stages} == {"m0": 1, "m1": 2, "m2": 1}
    assert plan.num_processes == 4
    assert found.prediction.samples_per_second > max(each.samples_per_second for each in found.plans.values())


def test_stages_with_a_common_parameter_have_as_many_processes() -> None:
    build = Builder()
    x = build.linear("words", build.data(), work=10)
    x = build.linear("head", build.linear("middle", x), parameter="words.weight")
    graph = build.step(x)
    graph = replace(graph, divided=dict.fromkeys(graph.parameter_sizes, 0))
    problem = replace(request(6), members=(1, 2)).problem(graph)
    assert [[problem.units.units[unit].modules[0] for unit in units] for units in problem.tied] == [["words", "head"]]
    for other in (1, 2):
        ways = ((1, 2), (1, 1), (1, other))
        draft = _draft(problem, [(0,), (1,), (2,)], aligned(*zip(*ways, strict=True)), ways)
        assert (Evaluator(problem)(draft).seconds < inf) == (other == 2)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_estimates_of_seconds_and_memory_are_those_of_programs(sharding: str) -> None:
    graph = chain(4, 10, 2)
    problem = replace(request(8, micro_batch_size=2, sharding=sharding, recompute=False), members=(1, 2, 4)).problem(
        graph
    )
    ways = ((2, 1), (1, 4), (1, 2))
    draft = _draft(problem, [(0,), (1,), (2,)], aligned(*zip(*ways, strict=True)), ways)
    found, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.plan.members == (2, 1, 1, 4)
    assert program.seconds == pytest.approx(found.seconds, rel=0.02)
    devices = [stage.devices[0] for stage in program.plan.stages]
    assert [program.peak_bytes[device] for device in devices] == pytest.approx(found.peak_bytes)


def test_groups_that_would_be_on_two_nodes_are_none() -> None:
    graph, cluster = chain(4, 10), Cluster.of_nodes("two", [Node(device=DEVICE, count=2)] * 2, Link())
    found = best_sizes("auto", replace(request(4), cluster=cluster), dict.fromkeys((1, 2, 4), graph))
    assert "would be on several nodes" in str(found.failures[4])
    problem = Request(cluster=cluster, batch_size=4, members=(1, 2)).problem(graph)
    assert not problem.placeable([1], 2)
    assert problem.placeable([0, 2], 2)
