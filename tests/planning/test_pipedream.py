from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from random import Random

import pytest

from lightning_gpp.cluster import Cluster, Link, Node
from lightning_gpp.costs.model import Footprint
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.planning import Problem
from lightning_gpp.planning.partitioners.pipedream import levels_of, place, solve
from lightning_gpp.planning.problem.units import Unit, UnitGraph, Value
from tests.planning.problems import DEVICE, Given, random_problem

FAST = Link(bytes_per_second=1e9)
TWO_BY_TWO = Cluster.of_nodes(
    "2 x 2", [Node(device=DEVICE, count=2, link=Link(bytes_per_second=200))] * 2, Link(bytes_per_second=50)
)


def chain_problem(
    work: list[float],
    cluster: Cluster,
    *,
    weights: float = 0,
    saved: float = 1,
    crossing: float = 0,
    sizes: tuple[int, ...] = (4,),
    **changes: object,
) -> Problem:
    """Units one after another: seconds per sample of a forward and its backward."""
    graph, count = OperatorGraph(), len(work)
    for index in range(count):
        graph.add(Operator(name=f"op{index}", target="call"))
    units = tuple(
        Unit(modules=(f"m{i}",), operators=(f"op{i}",), saved_bytes=Affine(saved), parameter_bytes=int(weights))
        for i in range(count)
    )
    values = tuple(Value(src=i, dsts=(i + 1,), bytes=Affine(crossing)) for i in range(count - 1))
    problem = Problem(
        graph=graph,
        costs=Given({f"op{i}": Affine(seconds / 3) for i, seconds in enumerate(work)}),
        units=UnitGraph(units=units, values=values),
        cluster=cluster,
        batch_size=16,
        sizes=sizes,
        footprint=Footprint(optimizer="sgd"),
        recompute=False,
    )
    return replace(problem, **changes)  # type: ignore[arg-type]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of `parts` positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield first, *rest


def slowest(problem: Problem, size: int, cuts: tuple[int, ...], replicas: tuple[int, ...], speed: float) -> float:
    """The bottleneck of a chain by the rules of the docstring, in plain loops; infinite where it lacks memory."""
    start, worst, workers = 0, 0.0, sum(replicas)
    for count, degree in zip(cuts, replicas, strict=True):
        units, share = range(start, start + count), ceil(size / degree)
        parameters = sum(problem.parameter_bytes[unit] for unit in units)
        in_flight = min(ceil(workers / degree), ceil(problem.batch_size / size))
        saved = sum(problem.saved_bytes(share)[unit] for unit in units)
        if in_flight * saved + problem.footprint.copies * parameters > min(problem.memory_bytes) * (1 + 1e-12):
            return inf
        compute = sum(problem.seconds(share).total[unit] for unit in units)
        gradients = 2 * (degree - 1) / degree * parameters / speed * size / problem.batch_size
        crossing = sum(
            value.bytes.at(size) * value.num_directions
            for value in problem.units.values
            if value.src < start <= max(value.dsts)
        )
        worst = max(worst, compute + gradients, crossing / speed / degree)
        start, workers = start + count, workers - degree
    return worst


@pytest.mark.parametrize("seed", range(20))
def test_no_chain_has_a_faster_bottleneck(seed: int) -> None:
    problem = random_problem(seed, num_devices=3 if seed % 2 else None)
    if len(levels_of(problem)) > 1:
        problem = replace(problem, cluster=Cluster.uniform(problem.cluster.devices[0], 4, FAST))
    count, devices, speed = problem.num_units, problem.num_devices, levels_of(problem)[0][1]
    for size in problem.sizes:
        options = {
            (cuts, replicas): slowest(problem, size, cuts, replicas, speed)
            for stages in range(1, min(count, devices) + 1)
            for cuts in compositions(count, stages)
            for replicas in compositions(devices, stages)
        }
        tables = solve(problem, size, levels_of(problem))
        best = tables[-1].best[-1, 0, count]
        assert best == pytest.approx(min(options.values()))
        if best < inf:
            placed = place(tables, 0, count)
            found = tuple(stop - start for start, stop, _ in placed), tuple(len(where) for _, _, where in placed)
            assert options[found] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_levels_nest(seed: int) -> None:
    """On 2 nodes of 2 devices: a node's best solution for each span is a stage of the level above."""
    random = Random(seed)
    problem = chain_problem([random.uniform(0.1, 1) for _ in range(5)], TWO_BY_TWO, weights=300, crossing=20)

    def within(start: int, stop: int) -> float:
        weights = 300 * (stop - start)
        together = sum(problem.seconds(2).total[start:stop]) + weights / 200 * 4 / 16
        apart = [
            max(sum(problem.seconds(4).total[start:c]), 20 * 4 * 2 / 200, sum(problem.seconds(4).total[c:stop]))
            for c in range(start + 1, stop)
        ]
        return min([together, *apart])

    whole = within(0, 5) / 2 + 5 * 300 / 50 * 4 / 16
    split = [max(within(0, c), 20 * 4 * 2 / 50, within(c, 5)) for c in range(1, 5)]
    assert solve(problem, 4, levels_of(problem))[-1].best[-1, 0, 5] == pytest.approx(min([whole, *split]))


def test_levels_of_clusters() -> None:
    def levels(cluster: Cluster) -> list[tuple[int, float]]:
        return levels_of(chain_problem([1], cluster))

    node = Node(device=DEVICE, count=3, link=Link(bytes_per_second=200))
    uneven = Cluster.of_nodes("3 + 2", [node, replace(node, count=2)], Link(bytes_per_second=50))
    assert levels(TWO_BY_TWO) == [(2, 200), (2, 50)]
    assert levels(TWO_BY_TWO.subset([0, 1])) == [(2, 200)]
    assert levels(TWO_BY_TWO.subset([0, 2])) == [(2, 50)]
    assert levels(uneven) == [(5, 50)]
    assert levels(Cluster.uniform(DEVICE, 1)) == [(1, inf)]
