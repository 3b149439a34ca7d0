from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf

import pytest

from lightning_gpp.cluster import Cluster, Link, Node
from lightning_gpp.costs.model import Footprint
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.planning import Evaluator, Problem, Request, SearchControl, best_plan
from lightning_gpp.planning.partitioners.pipedream import pipedream
from lightning_gpp.planning.problem.units import Unit, UnitGraph, Value
from tests.planning import graphs
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


def with_memory(problem: Problem, memory: float) -> Problem:
    devices = tuple(replace(device, memory_bytes=memory) for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


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


@pytest.mark.parametrize("seed", range(12))
def test_no_chain_has_a_faster_bottleneck(seed: int) -> None:
    problem = random_problem(seed, num_devices=2 + seed % 2)
    count, devices, speed = problem.num_units, problem.num_devices, problem.cluster.link(0, 1).bytes_per_second
    for size in problem.sizes:
        options = {
            (cuts, replicas): slowest(problem, size, cuts, replicas, speed)
            for stages in range(1, min(count, devices) + 1)
            for cuts in compositions(count, stages)
            for replicas in compositions(devices, stages)
            if max(replicas) <= size
        }
        answer = pipedream(replace(problem, sizes=(size,), recompute=False), SearchControl())
        if answer.draft is not None:
            assert answer.objective * size == pytest.approx(min(options.values()))
            stages = answer.draft.stages
            found = tuple(len(stage.units) for stage in stages), tuple(len(stage.devices) for stage in stages)
            assert options[found] == pytest.approx(min(options.values()))
        elif min(options.values()) < inf:
            assert "does not fit" in answer.notes[0]


def test_sums_inside_a_node_are_faster_than_between_nodes() -> None:
    """Sums of 1200 bytes take 1200/200 s between two replicas of a node, three times as long with four of two nodes."""
    problem = chain_problem([1.0, 1.0], TWO_BY_TWO, weights=1200, crossing=1)
    answer = pipedream(problem, SearchControl())
    assert answer.draft is not None
    assert [len(stage.devices) for stage in answer.draft.stages] == [2, 2]
    assert answer.objective == pytest.approx(1 / 2 + 1200 / 200 / 16)


def test_a_unit_that_dominates_is_replicated() -> None:
    problem = chain_problem([1, 4, 1], Cluster.uniform(DEVICE, 6, FAST), crossing=1)
    answer = pipedream(problem, SearchControl())
    assert answer.draft is not None
    assert [len(stage.devices) for stage in answer.draft.stages] == [1, 4, 1]
    assert [stage.devices for stage in answer.draft.stages] == [(5,), (1, 2, 3, 4), (0,)]
    assert answer.objective == pytest.approx(1.0)


def test_equal_units_are_a_straight_pipeline_where_gradients_are_dear() -> None:
    problem = chain_problem([1, 1, 1, 1], Cluster.uniform(DEVICE, 4, Link(bytes_per_second=100)), weights=10_000)
    answer = pipedream(problem, SearchControl())
    assert answer.draft is not None
    assert [stage.units for stage in answer.draft.stages] == [(0,), (1,), (2,), (3,)]
    assert answer.draft.chained


def test_gradients_are_paid_once_per_mini_batch() -> None:
    """2(m - 1)/m of 1000 bytes at 100 bytes/s are 10 s on 2 devices, for 16 samples; computing takes 1/2 s for each."""
    problem = chain_problem([1], Cluster.uniform(DEVICE, 2, Link(bytes_per_second=100)), weights=1000)
    assert pipedream(problem, SearchControl()).objective == pytest.approx(0.5 + 10 / 16)


def test_the_plan_fits_memory() -> None:
    """In flight the first of 4 stages holds 4 micro-batches: 2 of 8 equal units need 40 + 4 x 80 bytes there."""
    roomy = chain_problem([1.0] * 8, Cluster.uniform(DEVICE, 4, Link(bytes_per_second=1)), weights=10, saved=10)
    tight = with_memory(roomy, 300)
    free, limited = pipedream(roomy, SearchControl()).draft, pipedream(tight, SearchControl()).draft
    assert free is not None
    assert limited is not None
    assert [len(stage.units) for stage in free.stages] == [2, 2, 2, 2]
    assert len(limited.stages[0].units) == 1
    assert Evaluator(tight)(limited).fits
    assert not Evaluator(tight)(free).fits


def test_without_memory_there_is_no_plan() -> None:
    problem = with_memory(chain_problem([1, 1], Cluster.uniform(DEVICE, 2, FAST), weights=100), 150)
    answer = pipedream(problem, SearchControl())
    assert answer.draft is None
    assert "No chain of stages uses all devices" in answer.notes[0]


def test_recomputation_where_it_is_demanded() -> None:
    """A third more for the first stage; the last one runs the user's step, which is never run twice."""
    cluster = Cluster.uniform(DEVICE, 2, Link(bytes_per_second=100))
    problem = chain_problem([1, 1], cluster, weights=10_000, recompute=True)
    answer = pipedream(problem, SearchControl())
    assert answer.draft is not None
    assert [stage.recompute for stage in answer.draft.stages] == [True, False]
    assert answer.objective == pytest.approx(4 / 3)


def towers(num_towers: int, num_layers: int) -> OperatorGraph:
    """Without data, whose way to the first stages is not part of a draft."""
    build = graphs.Builder()
    outputs = []
    for tower in range(num_towers):
        x = build.linear(f"towers.{tower}.0")
        for layer in range(1, num_layers):
            x = build.linear(f"towers.{tower}.{layer}", x, work=1 + layer)
        outputs.append(x)
    return build.step(build.linear("head", build.call("", *outputs, width=64 * num_towers)))


@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4])
def test_chained_drafts_are_simulated_as_they_run(num_towers: int, size: int) -> None:
    graph = towers(num_towers, 3)
    cluster = Cluster.uniform(DEVICE, 4, Link(latency=1e-3, bytes_per_second=1e7))
    limits = {"max_replicas": 1, "num_pipelines": 1}
    request = Request(cluster=cluster, batch_size=16, micro_batch_size=size, **limits)
    found = best_plan("pipedream", graph, request)
    assert found.search.draft is not None
    evaluation = Evaluator(request.problem(graph))(found.search.draft)
    assert found.seconds == pytest.approx(evaluation.seconds, rel=1e-9)
    assert found.timeline.peak_bytes[::-1] == pytest.approx(evaluation.peak_bytes)
    assert evaluation.in_flight == tuple(min(16 // size, count) for count in (4, 3, 2, 1))
    assert found.plan.depth == 4
