"""Random requests, and their best plan by trying every one: programs are simulated, nothing of a search is used.

A plan is a partition of the units without cycles, a set of devices for every stage (others are idle), one micro-batch
size, and for every stage a number of micro-batches of slack and what it recomputes: all, or any blocks. Plans are tried
in the order of a simple bound (`_least`); the first whose bound is above the best step ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from random import Random

import networkx as nx

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.errors import GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Evaluation, Evaluator, Problem, Request
from tests.planning.graphs import Builder

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e10)
MAX_SLACK = 2

Groups = list[tuple[int, ...]]


def random_request(seed: int) -> tuple[OperatorGraph, Request]:
    """A random model of three to five modules, the last of which reads all branches, for two to four devices."""
    random = Random(seed)
    graph = _random_graph(random, random.randint(3, 5))
    cluster = _random_cluster(random, random.randint(2, 4))
    request = Request(
        cluster=cluster,
        batch_size=random.choice((4, 6, 8)),
        recompute=random.choice((False, False, None)),
        num_pipelines=random.choice((1, 1, None)),
        max_replicas=random.choice((None, None, 1)),
        idle_devices=True,
        simplicity=0.0,
        seconds=60.0,
    )
    if request.num_pipelines is None:
        request = replace(request, max_replicas=None)
    if random.random() < 0.5:
        request = replace(request, num_micro_batches=random.choice((2, request.batch_size // 2)))
    return graph, _tight(random, graph, request) if random.random() < 0.4 else request


def _random_graph(random: Random, number: int) -> OperatorGraph:
    build, results, read = Builder(), list[str](), set[int]()
    for index in range(number):
        last = index == number - 1
        unread = [other for other in range(index) if other not in read]
        sources = unread if last else random.sample(range(index), k=min(index, random.choice((0, 1, 1, 2))))
        inputs = [results[source] for source in sources] or [build.data()]
        read |= set(sources)
        width = random.choice((32, 64, 256))
        results.append(build.linear(f"m{index}", *inputs, width=width, work=random.uniform(0.2, 2.0)))
    return build.step(results[-1])


def _random_cluster(random: Random, number: int) -> Cluster:
    link = Link(latency=random.choice((1e-5, 1e-3, 4e-3)), bytes_per_second=random.choice((1e5, 1e6, 1e8)))
    if number == 4 and random.random() < 0.4:
        node = Node(device=DEVICE, count=2, link=link)
        far = Link(latency=4 * link.latency, bytes_per_second=link.bytes_per_second / 4)
        return Cluster.of_nodes("two nodes", [node, node], far)
    return Cluster.uniform(DEVICE, number, link)


def _tight(random: Random, graph: OperatorGraph, request: Request) -> Request:
    """The request with memory for a part of what one device would need for everything."""
    problem = request.problem(graph)
    everything = float(problem.static_bytes.sum() + problem.saved_bytes(problem.sizes[-1]).sum())
    device = replace(DEVICE, memory_bytes=random.uniform(0.4, 1.1) * everything)
    cluster = replace(request.cluster, devices=(device,) * request.cluster.num_devices)
    return replace(request, cluster=cluster)


@dataclass(frozen=True, slots=True)
class Optimum:
    """The most samples per second of any plan that fits, 0 if none does, its draft, and how many were simulated."""

    samples_per_second: float
    draft: Draft | None
    simulated: int


def optimum(problem: Problem) -> Optimum:
    """The best of all plans."""
    best, draft, number = 0.0, None, 0
    for least, candidate in sorted(((_least(problem, entry), entry) for entry in drafts(problem)), key=_bound):
        if least == inf or problem.batch_size / least <= best:
            break
        for slackened in with_slack(problem, candidate):
            number += 1
            try:
                prediction = simulated(problem, slackened)
            except GPPError:
                break  # values that replicas cannot share
            if prediction.fits and prediction.samples_per_second > best:
                best, draft = prediction.samples_per_second, slackened
    return Optimum(best, draft, number)


def best_of_all(problem: Problem) -> Evaluation:
    """The evaluation of the draft with the shortest estimate of all that fit the memory, on all devices."""
    evaluate = Evaluator(problem)
    whole = (draft for draft in drafts(problem) if _num_devices(draft) == problem.num_devices)
    return min(map(evaluate, whole), key=lambda evaluation: evaluation.rank)


def _num_devices(draft: Draft) -> int:
    return sum(len(stage.devices) for stage in draft.stages)


def with_slack(problem: Problem, draft: Draft) -> Iterator[Draft]:
    """The draft with every slack of every stage that lets it have more of its micro-batches in flight."""
    number = -(-problem.batch_size // draft.stages[0].micro_batch_size)
    graph = stage_graph(problem, draft)
    behind = dict[int, int]()
    for stage in reversed(list(nx.topological_sort(graph))):
        behind[stage] = 1 + max((behind[after] for after in graph.successors(stage)), default=0)
    most = [
        0 if graph.out_degree(stage) == 0 else max(0, min(MAX_SLACK, number - behind[stage]))
        for stage in range(len(draft.stages))
    ]
    for slack in product(*(range(count + 1) for count in most)):
        stages = zip(draft.stages, slack, strict=True)
        yield replace(draft, stages=tuple(replace(stage, slack=count) for stage, count in stages))


def stage_graph(problem: Problem, draft: Draft) -> nx.DiGraph:
    """The stages, and which needs results of which."""
    owner = {unit: index for index, stage in enumerate(draft.stages) for unit in stage.units}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(draft.stages)))
    graph.add_edges_from((owner[a], owner[b]) for a, b in problem.order.edges if owner[a] != owner[b])
    return graph


def _bound(entry: tuple[float, Draft]) -> float:
    return entry[0]


def _least(problem: Problem, draft: Draft) -> float:
    """Seconds that the draft's step cannot beat; infinite if its weights exceed the memory.

    A stage computes all micro-batches, after the first went forward through all stages ahead of it, and before the last
    goes backward through them. (If the last stage has replicas, the user's step is apart, and only that need wait.)
    """
    graph = stage_graph(problem, draft)
    seconds, ahead = [_stage_seconds(problem, stage) for stage in draft.stages], dict[int, float]()
    for stage in nx.topological_sort(graph):
        alone = problem.num_units - 1 in draft.stages[stage].units and len(draft.stages[stage].devices) > 1
        ahead[stage] = (
            0.0
            if alone
            else max((ahead[before] + seconds[before] for before in graph.predecessors(stage)), default=0.0)
        )
    number = -(-problem.batch_size // draft.stages[0].micro_batch_size)
    too_much = any(_static(problem, stage) > problem.memory_bytes.min() for stage in draft.stages)
    return inf if too_much else max(ahead[stage] + number * own for stage, own in enumerate(seconds))


def _stage_seconds(problem: Problem, stage: DraftStage) -> float:
    """Seconds of the smallest share of a micro-batch that any replica has."""
    seconds = problem.seconds(max(1, stage.micro_batch_size // len(stage.devices)))
    again = seconds.forward if stage.recompute is True else 0.0
    return float((seconds.total + again)[list(stage.units)].sum())


def _static(problem: Problem, stage: DraftStage) -> float:
    return float(problem.static_bytes[list(stage.units)].sum())


def drafts(problem: Problem) -> Iterator[Draft]:
    """Every draft without slack, none twice."""
    for groups in partitions(problem):
        holds_step = [problem.num_units - 1 in group for group in groups]
        again = [_recomputed(problem, *entry) for entry in zip(groups, holds_step, strict=True)]
        for devices in placements(problem, holds_step):
            for size, flags in product(problem.sizes, product(*again)):
                stages = zip(groups, devices, flags, strict=True)
                yield Draft(
                    stages=tuple(
                        DraftStage(units=units, devices=where, micro_batch_size=size, recompute=flag)
                        for units, where, flag in stages
                    )
                )


def _recomputed(problem: Problem, group: Sequence[int], holds_step: bool) -> list[bool | tuple[str, ...]]:
    """What a stage may recompute."""
    if problem.recompute is not None:
        return [problem.recompute and not holds_step]
    pairs = zip(problem.blocks, problem.units_of_blocks, strict=True)
    inside = [block.path for block, units in pairs if units <= set(group)]
    sets = [paths for number in range(1, len(inside) + 1) for paths in combinations(inside, number)]
    return [False, *sets] if holds_step else [False, *sets, True]


def partitions(problem: Problem) -> Iterator[Groups]:
    """All ways to group the units such that the groups do not wait for each other in a circle."""
    for labels in _labels(problem.num_units, min(problem.num_units, problem.num_devices)):
        groups = [tuple(u for u, label in enumerate(labels) if label == number) for number in range(max(labels) + 1)]
        quotient = nx.DiGraph()
        quotient.add_edges_from((labels[a], labels[b]) for a, b in problem.order.edges if labels[a] != labels[b])
        if nx.is_directed_acyclic_graph(quotient):
            yield groups


def _labels(number: int, most: int, labels: Sequence[int] = ()) -> Iterator[Sequence[int]]:
    """Labels of groups, each new one the next number: every partition once."""
    if len(labels) == number:
        yield labels
        return
    for label in range(min(most, max(labels, default=-1) + 2)):
        yield from _labels(number, most, (*labels, label))


def placements(problem: Problem, holds_step: Sequence[bool]) -> Iterator[list[tuple[int, ...]]]:
    """All devices for all stages, device 0 among those of the step; equal devices behind equal links only once."""
    seen: set[tuple[int, ...]] = set()
    stages = range(len(holds_step))
    for labels in product((*stages, -1), repeat=problem.num_devices):
        if labels[0] == -1 or not holds_step[labels[0]] or not set(stages) <= set(labels):
            continue
        devices = [tuple(d for d, label in enumerate(labels) if label == stage) for stage in stages]
        counts = tuple(map(len, devices))
        if max(counts) > problem.max_replicas:
            continue
        copies = problem.replicable and len(set(counts)) == 1 < counts[0] and len(counts) > 1
        key = counts if problem.uniform and not copies else labels
        if key not in seen:
            seen.add(key)
            yield devices


def ratio(found: float, best: float) -> float:
    """Step time of a plan relative to the best; 1 if neither exists, infinite if only the best does."""
    return 1.0 if not best else best / found if found else inf
