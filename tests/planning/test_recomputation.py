"""The cheapest measures that make a draft fit: recomputed blocks, and split states."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Draft, DraftStage, Problem, Request, best_plan
from lightning_gpp.planning.problem.evaluate import Evaluator
from tests.planning.graphs import Builder
from tests.planning.problems import DEVICE

LINK = Link(latency=1e-5, bytes_per_second=1e9)


def layered(random: Random, number: int) -> OperatorGraph:
    """Layers of a wide and a narrow operator, of random work and width."""
    build = Builder()
    x = build.data(width=16)
    for index in range(number):
        y = build.linear(f"layers.{index}.up", x, width=random.choice((64, 128, 256)), work=random.uniform(0.2, 2))
        x = build.linear(f"layers.{index}.down", y, width=16, work=random.uniform(0.1, 0.5))
    return build.step(build.linear("head", x, width=16, work=0.1))


def problem_of(graph: OperatorGraph, num_devices: int, memory: float, **changes: object) -> Problem:
    cluster = Cluster.uniform(replace(DEVICE, memory_bytes=memory), num_devices, LINK)
    settings = {"max_replicas": 1, "num_micro_batches": 4} | changes
    return Request(cluster=cluster, batch_size=16, **settings).problem(graph)  # type: ignore[arg-type]


def two_stages(problem: Problem, last: int, **changes: object) -> Draft:
    units = tuple(range(problem.num_units))
    groups = units[: len(units) - last], units[len(units) - last :]
    size = problem.sizes[0]
    stages = [
        DraftStage(units=group, devices=(1 - index,), micro_batch_size=size) for index, group in enumerate(groups)
    ]
    return Draft(stages=tuple(stages), **changes)  # type: ignore[arg-type]


def least_by_trying(problem: Problem, draft: Draft) -> float:
    """The least seconds of the first stage's backward that fits, over all sets of blocks; infinite if none does."""
    evaluate, stage = Evaluator(problem), draft.stages[0]
    inside = [block.path for block, units in zip(problem.blocks, problem.units_of_blocks, strict=True)]
    inside = [path for path, units in zip(inside, problem.units_of_blocks, strict=True) if units <= set(stage.units)]
    best = float("inf")
    for number in range(len(inside) + 1):
        for paths in combinations(inside, number):
            tried = replace(stage, recompute=paths or False)
            last = replace(draft.stages[1], recompute=False)
            if evaluate(replace(draft, stages=(tried, last))).peak_bytes[0] <= problem.memory_bytes[0]:
                best = min(best, evaluate.figures(tried).backward)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_other_set_of_blocks_takes_less_time(seed: int) -> None:
    random = Random(seed)
    graph = replace(layered(random, 6), uncalled=frozenset({"layers"}))
    free = problem_of(graph, 2, 1e12)
    draft = two_stages(free, 3)
    full = Evaluator(free)(draft).peak_bytes[0]
    least = float(free.static_bytes[list(draft.stages[0].units)].sum())
    problem = problem_of(graph, 2, least + random.uniform(0.35, 0.95) * (full - least))
    fitted = Evaluator(problem).fitted(draft).stages[0]
    best = least_by_trying(problem, draft)
    if best < float("inf"):
        assert isinstance(fitted.recompute, tuple)
        assert Evaluator(problem).figures(fitted).backward == pytest.approx(best)


def test_the_program_needs_what_the_estimate_says() -> None:
    graph = replace(layered(Random(2), 8), uncalled=frozenset({"layers"}))
    free = problem_of(graph, 2, 1e12)
    peak = max(Evaluator(free)(two_stages(free, 7)).peak_bytes)
    static = max(float(free.static_bytes[list(stage.units)].sum()) for stage in two_stages(free, 7).stages)
    problem = problem_of(graph, 2, static + 0.6 * (peak - static))
    draft = Evaluator(problem).fitted(two_stages(problem, 7))
    assert any(isinstance(stage.recompute, tuple) for stage in draft.stages)
    estimate, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.fits == estimate.fits
    assert program.peak_bytes == pytest.approx(estimate.peak_bytes[::-1])
    assert program.seconds == pytest.approx(estimate.seconds, rel=0.02)


def of_one_device(graph: OperatorGraph) -> float:
    """Bytes that one device needs for everything, with one micro-batch in flight."""
    problem = problem_of(graph, 1, 1e12)
    return float(problem.static_bytes.sum() + problem.saved_bytes(problem.sizes[0]).sum())


@pytest.mark.parametrize(("sharding", "expected"), [("none", "none"), ("zero1", "zero1"), ("auto", "zero1")])
def test_what_replicas_split_counts_in_the_search(sharding: str, expected: str) -> None:
    """Weights that fit one device only if two share the optimizer's state: then two pipelines, otherwise stages."""
    graph = layered(Random(3), 6)
    cluster = Cluster.uniform(replace(DEVICE, memory_bytes=0.8 * of_one_device(graph)), 2, LINK)
    request = Request(cluster=cluster, batch_size=16, recompute=False, sharding=sharding)  # type: ignore[arg-type]
    prediction = best_plan("auto", graph, request)
    assert prediction.fits
    assert prediction.plan.sharding == expected
    assert (prediction.num_pipelines == 2) == (expected == "zero1")
