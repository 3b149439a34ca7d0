"""Of plans that are nearly as fast as the fastest, one with the fewest stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Evaluator, Problem, Request, SearchControl
from lightning_gpp.planning.partitioners.auto.search import auto
from tests.planning import graphs

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e10)


def problem_of(num_devices: int, **settings: Any) -> Problem:
    cluster = Cluster.uniform(DEVICE, num_devices, Link(latency=1e-5, bytes_per_second=1e7))
    return Request(cluster=cluster, batch_size=24, **settings).problem(graphs.two_towers(4))


def test_simpler_plans_stay_within_the_limit() -> None:
    fast, limit = problem_of(4, simplicity=0.0), 0.1
    fastest, simple = (auto(replace(fast, simplicity=each), SearchControl(seconds=30.0)) for each in (0.0, limit))
    assert fastest.draft is not None
    assert simple.draft is not None
    assert simple.objective == Evaluator(fast)(simple.draft).seconds <= fastest.objective * (1 + limit)
    assert len(simple.draft.stages) <= len(fastest.draft.stages)
