"""Of plans that are nearly as fast as the fastest, the simplest one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Answer, Draft, DraftStage, Evaluator, Problem, Request, SearchControl
from lightning_gpp.planning.partitioners.auto.search import auto
from lightning_gpp.planning.problem.draft import complexity
from tests.planning import graphs

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e10)


def problem_of(num_devices: int, **settings: Any) -> Problem:
    cluster = Cluster.uniform(DEVICE, num_devices, Link(latency=1e-5, bytes_per_second=1e7))
    return Request(cluster=cluster, batch_size=24, **settings).problem(graphs.two_towers(4))


def draft_of(problem: Problem, *borders: int, devices: list[tuple[int, ...]]) -> Draft:
    stops = (*borders, problem.num_units)
    stages = [
        DraftStage(units=tuple(range(start, stop)), devices=devices[index], micro_batch_size=4)
        for index, (start, stop) in enumerate(zip((0, *borders), stops, strict=True))
    ]
    return Draft(stages=tuple(stages))


def test_fewer_stages_before_undivided_blocks_before_equal_replicas() -> None:
    problem = problem_of(4)
    names = [unit.modules[0] for unit in problem.units.units]
    attention = names.index("image_tower.blocks.2.attn")
    one = draft_of(problem, devices=[(0, 1, 2, 3)])
    between = draft_of(problem, attention, devices=[(2, 3), (0, 1)])
    unequal = draft_of(problem, attention, devices=[(3,), (0, 1, 2)])
    inside = draft_of(problem, attention + 1, devices=[(2, 3), (0, 1)])
    three = draft_of(problem, attention, attention + 2, devices=[(3,), (2,), (0, 1)])
    keys = [complexity(problem, draft) for draft in (one, between, unequal, inside, three)]
    assert keys == sorted(keys)
    assert len(set(keys)) == 5
    assert keys[0] == (1, 0, 1)


@pytest.fixture(scope="module")
def fast() -> Problem:
    return problem_of(4, simplicity=0.0)


@pytest.fixture(scope="module")
def fastest(fast: Problem) -> Answer:
    return auto(fast, SearchControl(seconds=30.0))


@pytest.mark.parametrize("simplicity", [0.02, 0.1, 0.5])
def test_simpler_plans_stay_within_the_limit(simplicity: float, fast: Problem, fastest: Answer) -> None:
    simple = auto(replace(fast, simplicity=simplicity), SearchControl(seconds=30.0))
    assert fastest.draft is not None
    assert simple.draft is not None
    assert simple.objective == Evaluator(fast)(simple.draft).seconds <= fastest.objective * (1 + simplicity)
    assert complexity(fast, simple.draft) <= complexity(fast, fastest.draft)
    if simplicity == 0.5:
        assert complexity(fast, simple.draft) < complexity(fast, fastest.draft)
        assert simple.alternatives[0] == fastest.draft
