"""`auto` against the other partitioners, and against itself on fewer devices, judged by programs."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.planning.problem.partitioner import partitioner_names
from tests.planning import graphs
from tests.planning.brute_force import random_request
from tests.planning.problems import DEVICE

OTHERS = sorted(set(partitioner_names()) - {"auto"})


def rate(partitioner: str, graph: OperatorGraph, request: Request) -> float:
    """Samples per second of the program of the partitioner's plan; 0 if it finds none that fits."""
    try:
        found = best_plan(partitioner, graph, request)
    except PlanError:
        return 0.0
    return found.samples_per_second if found.fits else 0.0


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_no_partitioner_is_ahead_of_auto(seed: int) -> None:
    graph, request = random_request(seed)
    ours = rate("auto", graph, request)
    rates = {name: rate(name, graph, request) for name in OTHERS}
    assert max(rates.values()) <= ours * (1 + 1e-9), rates


@pytest.mark.parametrize("slow", [False, True])
def test_more_devices_are_never_slower(slow: bool) -> None:
    """With links that make sharing worthless, too: then devices stay idle."""
    graph = graphs.feature_towers(3, 2, trunk=1)
    link = Link(latency=1e-2, bytes_per_second=1e4) if slow else Link(latency=1e-5, bytes_per_second=1e9)
    ask = partial(Request, batch_size=16, simplicity=0.0, seconds=60.0)
    rates = [rate("auto", graph, ask(cluster=Cluster.uniform(DEVICE, number, link))) for number in (1, 2, 4, 8)]
    assert rates[0] > 0
    assert all(after >= before * (1 - 1e-9) for before, after in zip(rates, rates[1:], strict=False))
    assert (rates[-1] > rates[0]) != slow
