"""Of plans that are nearly as fast as the fastest, one with the fewest stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Answer, Evaluator, Problem, Request, SearchControl
from lightning_gpp.planning.partitioners.auto.search import auto
from tests.planning import graphs

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e10)


def problem_of(num_devices: int, **settings: Any) -> Problem:
    cluster = Cluster.uniform(DEVICE, num_devices, Link(latency=1e-5, bytes_per_second=1e7))
    return Request(cluster=cluster, batch_size=24, **settings).problem(graphs.two_towers(4))


@pytest.fixture(scope="module")
def fast() -> Problem:
    return problem_of(4, simplicity=0.0)


@pytest.fixture(scope="module")
def fastest(fast: Problem) -> Answer:
    return auto(fast, SearchControl(seconds=30.0))


@pytest.mark.parametrize(
    "simplicity", [*(pytest.param(each, marks=pytest.mark.acceptance) for each in (0.02, 0.1)), 0.5]
)
def test_simpler_plans_stay_within_the_limit(simplicity: float, fast: Problem, fastest: Answer) -> None:
    simple = auto(replace(fast, simplicity=simplicity), SearchControl(seconds=30.0))
    assert fastest.draft is not None
    assert simple.draft is not None
    assert simple.objective == Evaluator(fast)(simple.draft).seconds <= fastest.objective * (1 + simplicity)
    assert len(simple.draft.stages) <= len(fastest.draft.stages)
    if simplicity == 0.5:
        assert len(simple.draft.stages) < len(fastest.draft.stages)
        assert simple.alternatives[0] == fastest.draft
