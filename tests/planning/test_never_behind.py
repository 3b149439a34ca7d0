"""`auto` against the other partitioners, and against itself on fewer devices, judged by programs."""

from __future__ import annotations

import pytest

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.planning.problem.partitioner import partitioner_names
from tests.planning.brute_force import random_request

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
