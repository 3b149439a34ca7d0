from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import ceil, inf
from random import Random

import networkx as nx
import pytest

from lightning_gpp.cluster import Cluster
from lightning_gpp.planning import Problem, Request, SearchControl
from lightning_gpp.planning.partitioners.chains import precedence, slowest_link
from lightning_gpp.planning.partitioners.pipedream import pipedream
from lightning_gpp.planning.partitioners.piper import piper
from lightning_gpp.planning.problem.units import UnitGraph
from tests.planning import graphs
from tests.planning.problems import DEVICE, problem_of, random_problem
from tests.planning.test_pipedream import FAST, chain_problem, compositions

Chain = list[tuple[int, ...]]


def chains_of(graph: nx.DiGraph, units: frozenset[int]) -> Iterator[Chain]:
    """All ways to peel a set of units into stages, each closed under predecessors among what is left."""
    if not units:
        yield []
    for count in range(1, len(units) + 1):
        for stage in combinations(sorted(units), count):
            if all(before in stage or before not in units for unit in stage for before in graph.predecessors(unit)):
                for rest in chains_of(graph, units - set(stage)):
                    yield [stage, *rest]


def slowest(problem: Problem, size: int, chain: Chain, replicas: tuple[int, ...]) -> float:
    """Seconds per sample of the slowest stage, in plain loops; infinite where a stage lacks memory."""
    worst, left, speed = 0.0, sum(replicas), slowest_link(problem)
    for index, (units, degree) in enumerate(zip(chain, replicas, strict=True)):
        share = size // degree
        seconds, saved = problem.seconds(share), problem.saved_bytes(share)
        parameters = sum(problem.parameter_bytes[unit] for unit in units)
        crossing = received = 0.0
        for value in problem.units.values:
            for dst in value.dsts:
                if (value.src in units) != (dst in units):
                    crossing += value.bytes.at(size) * value.num_directions
                    received += value.bytes.at(share) * (dst in units)
        in_flight = min(ceil(left / degree), ceil(problem.batch_size / size))
        limit = min(problem.memory_bytes) * (1 + 1e-12) - problem.footprint.copies * parameters
        kept = sum(saved[unit] for unit in units)
        compute = sum(seconds.total[unit] for unit in units)
        if in_flight * kept > limit:
            allowed = problem.recompute is not False and index < len(chain) - 1
            if not allowed or in_flight * received + kept > limit:
                return inf
            compute += sum(seconds.forward[unit] for unit in units)
        moved = crossing / size / degree + 2 * (degree - 1) / degree * parameters / problem.batch_size
        worst = max(worst, compute / size + moved / speed)
        left -= degree
    return worst


@pytest.mark.parametrize("seed", range(10))
def test_no_chain_has_a_faster_bottleneck(seed: int) -> None:
    problem = random_problem(seed, num_units=3 + seed % 3, num_devices=2 + seed % 3)
    every = frozenset(range(problem.num_units))
    chains = [chain for chain in chains_of(precedence(problem), every) if len(chain) <= problem.num_devices]
    best = {}
    for size in problem.sizes:
        best[size] = min(
            slowest(problem, size, chain, replicas)
            for chain in chains
            for replicas in compositions(problem.num_devices, len(chain))
            if not any(size % degree for degree in replicas)
        )
        answer = piper(replace(problem, sizes=(size,)), SearchControl())
        if answer.draft is not None:
            assert answer.objective == pytest.approx(best[size])
            found = [stage.units for stage in answer.draft.stages]
            replicas = tuple(len(stage.devices) for stage in answer.draft.stages)
            assert slowest(problem, size, found, replicas) == pytest.approx(best[size])
            assert answer.draft.chained
        elif best[size] < inf:
            assert "does not fit" in answer.notes[0]


def test_a_stage_may_span_branches() -> None:
    """Two branches, of 2 + 4 seconds each: only a stage with the heads of both lets three stages take 4 seconds."""
    values = [(0, (1,)), (1, (4,)), (2, (3,)), (3, (4,))]
    chain = chain_problem([2, 4, 2, 4, 0.1], Cluster.uniform(DEVICE, 3, FAST), max_replicas=1)
    branches = problem_of(Random(0), 5, values, chain.cluster).units.values
    problem = chain.on(UnitGraph(units=chain.units.units, values=branches))
    answer, by_order = piper(problem, SearchControl()), pipedream(problem, SearchControl())
    assert answer.draft is not None
    assert answer.draft.stages[0].units == (0, 2)
    assert answer.objective < 4.2
    assert by_order.objective > 5.9


def test_too_many_downsets_are_refused() -> None:
    request = Request(cluster=Cluster.uniform(DEVICE, 4, FAST), batch_size=16)
    answer = piper(request.problem(graphs.feature_towers(7, 4, trunk=4)), SearchControl())
    assert answer.draft is None
    assert "more than 40,000 downsets" in answer.notes[0]
