"""GraphPipe's partitioner against every strategy of its space, and against the figures of its paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from random import Random

import networkx as nx
import pytest

from lightning_gpp.cluster import Cluster, Link, Node
from lightning_gpp.costs.model import Footprint
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.planning import Answer, Draft, DraftStage, Evaluator, Problem
from lightning_gpp.planning.partitioners.graphpipe import graphpipe, lines
from lightning_gpp.planning.partitioners.graphpipe.lines import converted, orders_of, shape_of
from lightning_gpp.planning.partitioners.graphpipe.search import PRECISION, Piece, strategy
from lightning_gpp.planning.partitioners.graphpipe.series_parallel import Fork, Line, LinePart, units_of
from lightning_gpp.planning.partitioners.graphpipe.solve import Grid, Solver
from lightning_gpp.planning.partitioners.graphpipe.tables import Tables, weakest_link
from lightning_gpp.planning.problem.partitioner import SearchControl
from lightning_gpp.planning.problem.units import Unit, UnitGraph, Value
from tests.planning.lines import order_of, parallel, series
from tests.planning.problems import DEVICE, Given

Stage = frozenset[int]


# Every strategy of the space, by plain loops over the definition in the package's docstring.


def lines_of(line: Line) -> Iterator[Sequence[LinePart]]:
    yield line.parts
    for part in line.parts:
        if isinstance(part, Fork):
            for branch in part.lines:
                yield from lines_of(branch)


def units_in(parts: Sequence[LinePart]) -> set[int]:
    return {unit for part in parts for unit in units_of(part)}


def trees_of(problem: Problem) -> list[Line]:
    """The order of the units, and those in which the branches of its forks are in bundles: forks inside branches."""
    return list(orders_of(problem, converted(problem)))


def legal_stages(tree: Line) -> set[Stage]:
    found = set()
    for parts in lines_of(tree):
        for start in range(len(parts)):
            for end in range(start + 1, len(parts) + 1):
                tails: list[set[int]] = [set()]
                if start and isinstance(fork := parts[start - 1], Fork):
                    for branch in fork.lines:
                        tails += [units_in(branch.parts[at:]) for at in range(len(branch.parts))]
                found |= {frozenset(tail | units_in(parts[start:end])) for tail in tails}
    return found


def divisions(stages: Sequence[Stage], units: Stage, most: int) -> Iterator[list[Stage]]:
    if not units:
        yield []
    elif most:
        for stage in stages:
            if min(units) in stage and stage <= units:
                for rest in divisions(stages, units - stage, most - 1):
                    yield [stage, *rest]


@dataclass
class Judge:
    """Costs of stages by plain loops."""

    problem: Problem
    size: int
    known: dict[tuple[Stage, int], tuple[float, float, float, float, float, float]] = field(default_factory=dict)

    def link(self, num_devices: int) -> Link:
        inner, *outer = self.problem.cluster.levels
        return outer[0].link if outer and num_devices > inner.groups.count(0) else inner.link

    def figures(self, stage: Stage, replicas: int) -> tuple[float, float, float, float, float, float]:
        """Seconds per sample, static and kept bytes; the same with recomputing, and its working bytes."""
        if (stage, replicas) in self.known:
            return self.known[stage, replicas]
        problem, share = self.problem, -(-self.size // replicas)
        seconds, kept, static, forward, received = 0.0, 0.0, 0.0, 0.0, 0.0
        rigid = False
        parameters = 0.0
        for unit in stage:
            seconds += problem.seconds(share).total[unit]
            forward += problem.seconds(share).forward[unit]
            kept += problem.saved_bytes(share)[unit]
            static += problem.static_bytes[unit]
            parameters += problem.parameter_bytes[unit]
            rigid |= not problem.units.units[unit].divisible
        for value in problem.units.values:
            comes_in = value.src not in stage and any(dst in stage for dst in value.dsts)
            goes_out = value.src in stage and any(dst not in stage for dst in value.dsts)
            if comes_in or goes_out:
                seconds += value.num_directions * self.link(2 * replicas).seconds(value.bytes.at(share))
                rigid |= not value.sliceable
            if comes_in:
                received += value.bytes.at(share)
        per_sample = seconds / self.size
        if replicas > 1:
            ring = 2 * (replicas - 1) * self.link(replicas).seconds(parameters / replicas)
            per_sample += ring / problem.batch_size
        if replicas > 1 and rigid:
            per_sample = inf
        again = problem.recompute is not False and problem.num_units - 1 not in stage
        longer = per_sample + forward / self.size if again else inf
        if again and problem.recompute is True:
            per_sample = inf
        self.known[stage, replicas] = per_sample, static, kept, longer, received, kept
        return self.known[stage, replicas]

    def seconds(self, stage: Stage, replicas: int, depth: int) -> float:
        """Seconds per sample without or, if it does not fit otherwise, with recomputing; infinite if it never fits."""
        in_flight = min(depth, -(-self.problem.batch_size // self.size))
        plain, static, kept, longer, received, working = self.figures(stage, replicas)
        memory = min(self.problem.memory_bytes)
        if static + in_flight * kept <= memory and plain < inf:
            return plain
        return longer if static + in_flight * received + working <= memory else inf

    def strategies(self, tree: Line) -> Iterator[tuple[float, int, dict[Stage, int]]]:
        """Bottleneck, depth of the deepest source, and replicas by stage, of every strategy of the space."""
        units, devices = frozenset(self.problem.order), self.problem.num_devices
        stages = sorted(legal_stages(tree), key=sorted)
        for division in divisions(stages, units, devices):
            depths = depths_of(self.problem.order, division)
            most = min(devices, self.size, self.problem.max_replicas)
            powers = [power for power in (1, 2, 4, 8) if power <= most]
            for replicas in product(powers, repeat=len(division)):
                if sum(replicas) == devices:
                    seconds = [self.seconds(*entry) for entry in zip(division, replicas, depths, strict=True)]
                    yield max(seconds), max(depths), dict(zip(division, replicas, strict=True))


def depths_of(order: nx.DiGraph, division: Sequence[Stage]) -> list[int]:
    """Stages on the longest path from each one; a division whose stages form a cycle would fail."""
    owner = {unit: index for index, stage in enumerate(division) for unit in stage}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(division)))
    graph.add_edges_from((owner[a], owner[b]) for a, b in order.edges if owner[a] != owner[b])
    depths = [0] * len(division)
    for index in reversed(list(nx.topological_sort(graph))):
        depths[index] = 1 + max((depths[other] for other in graph.successors(index)), default=0)
    return depths


# Random problems.


def random_tree(random: Random, num_units: int) -> Line:
    """Numbered from left to right; branches of a fork are often alike."""
    names = iter(range(num_units))

    def grow(size: int, kind: int) -> Line:
        if size == 1:
            return Line((next(names),))
        sizes = []
        while size:
            sizes.append(random.randint(1, max(1, min(size, size - (not sizes)))))
            size -= sizes[-1]
        if kind and len(sizes) > 1 and random.random() < 0.5:  # branches of one size
            sizes = [sum(sizes) // 2] * 2 + [1] * (sum(sizes) % 2)
        parts = [grow(part, 1 - kind) for part in sizes]
        return (parallel if kind else series)(parts)

    return grow(num_units, int(random.random() < 0.3))


def values_of(random: Random, tree: Line) -> tuple[Value, ...]:
    """Tensors along the order of a tree and along some pairs that follow from it; some have several readers."""
    order = order_of(tree)
    for src in list(order):
        order.add_edges_from((src, dst) for dst in nx.descendants(order, src) if random.random() < 0.1)
    found = []
    for src in order:
        dsts = tuple(sorted(order.successors(src)))
        shared = random.random() < 0.6
        for readers in [dsts] if shared and dsts else [(dst,) for dst in dsts]:
            size = Affine(random.choice((1.0, 4.0)), random.choice((0.0, 2.0)))
            directions = random.choice((2, 2, 1))
            sliceable = random.random() < 0.98
            found.append(Value(src=src, dsts=readers, bytes=size, num_directions=directions, sliceable=sliceable))
    return tuple(found)


def problem_of(
    values: Sequence[Value],
    kinds: Sequence[tuple[float, float, int]],
    cluster: Cluster,
    size: int,
    *,
    divisible: Sequence[bool] = (),
    batch_size: int = 12,
    recompute: bool | None = None,
) -> Problem:
    """Units of given kinds: forward seconds and saved bytes per sample, bytes of parameters."""
    graph = OperatorGraph()
    for index in range(len(kinds)):
        graph.add(Operator(name=f"op{index}", target="call"))
    units = tuple(
        Unit(
            modules=(f"m{index}",),
            operators=(f"op{index}",),
            saved_bytes=Affine(saved),
            parameter_bytes=parameters,
            divisible=divisible[index] if divisible else True,
        )
        for index, (_, saved, parameters) in enumerate(kinds)
    )
    return Problem(
        single_step=False,
        graph=graph,
        costs=Given({f"op{index}": Affine(seconds, seconds / 8) for index, (seconds, _, _) in enumerate(kinds)}),
        units=UnitGraph(units=units, values=tuple(values)),
        cluster=cluster,
        batch_size=batch_size,
        sizes=(size,),
        footprint=Footprint(optimizer="sgd"),
        recompute=recompute,
    )


def cluster_of(num_devices: int, memory: float, nodes: bool = False) -> Cluster:
    device, inside = replace(DEVICE, memory_bytes=memory), Link(latency=1e-3, bytes_per_second=100)
    if not nodes:
        return Cluster.uniform(device, num_devices, inside)
    node = Node(device=device, count=num_devices // 2, link=inside)
    return Cluster.of_nodes("two nodes", [node, node], Link(latency=1e-2, bytes_per_second=25))


def random_problem(seed: int) -> tuple[Problem, Line]:
    random = Random(seed)
    num_units, num_devices = random.randint(2, 7), random.choice((1, 2, 3, 4, 4))
    tree = random_tree(random, num_units)
    palette = [(random.choice((0.1, 0.3, 0.5)), random.uniform(5, 30), random.randint(0, 50)) for _ in range(2)]
    kinds = [random.choice(palette) for _ in range(num_units)]
    size = random.choice((1, 2, 3, 4))
    everything = sum(2 * parameters + 2 * size * saved for _, saved, parameters in kinds)
    memory = 1e9 if random.random() < 0.3 else random.uniform(0.3, 1.2) * everything
    problem = problem_of(
        values_of(random, tree),
        kinds,
        cluster_of(num_devices, memory, nodes=num_devices == 4 and random.random() < 0.5),
        size,
        divisible=[random.random() < 0.95 for _ in kinds],
        recompute=random.choice((None, True, False)),
    )
    return replace(problem, max_replicas=random.choice((inf, inf, 2, 1))), tree


def solved(problem: Problem, target: float = inf) -> list[Piece] | None:
    tables = Tables(problem, problem.sizes[0], shape_of(converted(problem), problem.units.values), "1f1b")
    return strategy(Solver(tables, target, Grid(problem.num_devices)))


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 100, 20)], ids=str)
def test_equals_the_best_of_all_strategies(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bundles, which only add to the space."""
    monkeypatch.setattr(lines, "BUNDLES", ())
    for seed in seeds:
        problem, tree = random_problem(seed)
        assert converted(problem) == tree
        judge = Judge(problem, problem.sizes[0])
        best = min((seconds for seconds, _, _ in judge.strategies(tree)), default=inf)
        answer = graphpipe(problem, SearchControl())
        if best == inf:
            assert answer.draft is None, seed
            continue
        assert best * (1 - 1e-9) <= answer.objective <= best * (1 + PRECISION) * (1 + 1e-9), seed
        _check_draft(judge, tree, answer, seed)


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(1000, 1080, 40)], ids=str)
def test_equals_the_best_of_all_strategies_of_an_order(seeds: range) -> None:
    """Orders with bundles compete by the simulated step, so the answer is the best one of one of the orders."""
    bundles = 0
    for seed in seeds:
        problem, _ = random_problem(seed)
        judge = Judge(problem, problem.sizes[0])
        trees = trees_of(problem)
        best = [min((seconds for seconds, _, _ in judge.strategies(tree)), default=inf) for tree in trees]
        answer = graphpipe(problem, SearchControl())
        assert (answer.draft is None) == (min(best) == inf), seed
        if answer.draft is not None:
            bundles += len(trees) > 1
            within = [low * (1 - 1e-9) <= answer.objective <= low * (1 + PRECISION) * (1 + 1e-9) for low in best]
            assert any(within), seed
    assert bundles


def _check_draft(judge: Judge, tree: Line, answer: Answer, seed: int) -> None:
    """The draft is a strategy of the space, is as fast as it is said to be, and fits."""
    problem, draft = judge.problem, answer.draft
    assert draft is not None
    division = [frozenset(stage.units) for stage in draft.stages]
    assert sorted(unit for stage in division for unit in stage) == list(range(problem.num_units)), seed
    assert set(division) <= legal_stages(tree), seed
    devices = sorted(device for stage in draft.stages for device in stage.devices)
    assert devices == list(range(problem.num_devices)), seed
    evaluate = Evaluator(problem)
    assert evaluate(draft).fits, seed
    figures = [judge.figures(stage, len(entry.devices)) for stage, entry in zip(division, draft.stages, strict=True)]
    seconds = [entry[3] if stage.recompute else entry[0] for entry, stage in zip(figures, draft.stages, strict=True)]
    assert max(seconds) == pytest.approx(answer.objective, rel=1e-9), seed
    costs = [(evaluate.figures(stage), stage.micro_batch_size) for stage in draft.stages]
    bottleneck = max((entry.forward + entry.again + entry.backward) / size for entry, size in costs)
    assert bottleneck <= answer.objective * (1 + 1e-9), seed


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(200, 240, 20)], ids=str)
def test_fewest_in_flight_at_the_source_for_a_target(seeds: range) -> None:
    for seed in seeds:
        problem, tree = random_problem(seed)
        known = [(seconds, depth) for seconds, depth, _ in Judge(problem, problem.sizes[0]).strategies(tree)]
        best = min((seconds for seconds, _ in known), default=inf)
        if best == inf:
            assert solved(problem) is None
            continue
        for slack in (1 + 1e-9, 1.2, 2.0):
            pieces = solved(problem, best * slack)
            assert pieces is not None, seed
            fewest = min(depth for seconds, depth in known if seconds <= best * slack)
            assert max(piece.in_flight for piece in pieces) == fewest, seed
        assert solved(problem, best * (1 - 1e-6)) is None, seed


# The paper's cases.


def chained(tree: Line, size: float = 1e-6) -> list[Value]:
    order = order_of(tree)
    return [Value(src=src, dsts=(dst,), bytes=Affine(size)) for src, dst in order.edges]


def towers(num_towers: int, length: int, trunk: int) -> Line:
    names = iter(range(num_towers * length + trunk))
    lines = [series([Line((next(names),)) for _ in range(length)]) for _ in range(num_towers)]
    return series([parallel(lines), *(Line((next(names),)) for _ in range(trunk))])


def depth_of(problem: Problem, draft: Draft) -> int:
    return max(depths_of(problem.order, [frozenset(stage.units) for stage in draft.stages]))


def test_case_study_has_half_the_depth_of_a_chain() -> None:
    """GraphPipe, section 7.5: two branches of four equal stages, one of which also holds the concatenation."""
    tree = towers(2, 4, 1)
    kinds = [(1.0, 1.0, 10)] * 8 + [(0.001, 0.0, 0)]
    problem = problem_of(chained(tree), kinds, cluster_of(8, 1e9), 2, batch_size=64)
    draft = graphpipe(problem, SearchControl()).draft
    assert draft is not None
    assert sorted(len(stage.units) for stage in draft.stages) == [1] * 7 + [2]
    assert depth_of(problem, draft) == 5  # the branch without the concatenation has four stages, and that one follows
    assert Evaluator(problem)(draft).in_flight == tuple(
        depths_of(problem.order, [frozenset(stage.units) for stage in draft.stages])
    )


def candle() -> tuple[Problem, Line]:
    """Four drug branches, the gene branch with the concatenation, and the trunk: balanced for six devices."""
    tree = towers(5, 4, 5)
    layers, genes, join = [(1.0, 1.0, 10)] * 4, [(0.95, 1.0, 10)] * 4, [(0.1, 1.0, 10)]
    kinds = [*layers * 4, *genes, *join, *layers]
    problem = problem_of(chained(tree), kinds, cluster_of(6, 1e9), 64, batch_size=1024)
    return replace(problem, max_replicas=1), tree


def test_candle_has_the_in_flight_samples_of_its_authors_strategy() -> None:
    """Their strategy file: 192 samples for four branches, 128 for the branch with the join, 64 for the trunk."""
    problem, _ = candle()
    pieces = solved(problem, 4.05 * 3)  # less than the trunk with the join takes
    assert pieces is not None
    in_flight = {piece.units[0]: piece.in_flight * problem.sizes[0] for piece in pieces}
    assert {len(piece.units): piece.units for piece in pieces}[5] == (16, 17, 18, 19, 20)
    assert in_flight == {0: 192, 4: 192, 8: 192, 12: 192, 16: 128, 21: 64}
    units = sorted(piece.units for piece in pieces)
    stages = (DraftStage(units=own, devices=(5 - i,), micro_batch_size=64) for i, own in enumerate(units))
    assert Evaluator(problem)(Draft(stages=tuple(stages))).in_flight == (3, 3, 3, 3, 2, 1)


# Memory.


def chain_problem(memory: float, recompute: bool | None, num_devices: int = 2) -> Problem:
    """Four layers that each keep 10 bytes per sample, pass on 1, and hold 20 bytes of weights with their gradients."""
    tree = series([Line((index,)) for index in range(4)])
    return problem_of(
        chained(tree, 1.0), [(1.0, 10.0, 10)] * 4, cluster_of(num_devices, memory), 1, recompute=recompute
    )


def test_recomputes_only_where_nothing_else_fits() -> None:
    """Stages of two layers: 40 bytes stay, and two micro-batches of 20 bytes are in flight at the first."""
    roomy = graphpipe(chain_problem(80.0, None), SearchControl()).draft
    tight = graphpipe(chain_problem(75.0, None), SearchControl()).draft
    assert roomy is not None
    assert tight is not None
    assert [stage.recompute for stage in roomy.stages] == [False, False]
    assert [stage.recompute for stage in tight.stages] == [True, False]
    assert [len(stage.units) for stage in tight.stages] == [2, 2]


# Choices.


def test_weakest_link() -> None:
    cluster = cluster_of(8, 1e9, nodes=True)
    inside, between = (level.link for level in cluster.levels)
    assert [weakest_link(cluster, number) for number in (1, 4, 5, 8, 16)] == [inside, inside, between, between, between]
    slow = Link(latency=1.0, bytes_per_second=1e6)
    single = weakest_link(replace(cluster, links={(0, 1): slow}), 1)
    assert single == Link(latency=1.0, bytes_per_second=between.bytes_per_second)
