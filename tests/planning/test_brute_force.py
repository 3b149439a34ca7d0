"""`auto`, with its choice by programs, against the best of all plans that a brute force finds, and the bound."""

from __future__ import annotations

import pytest

from lightning_gpp.errors import PlanError
from lightning_gpp.planning import best_plan
from tests.planning.brute_force import optimum, random_request, ratio

EQUAL = 1 + 1e-6


def ratio_of(seed: int) -> float:
    """Step time of the plan found, relative to the best one. The bound must not be above either."""
    graph, request = random_request(seed)
    best = optimum(request.problem(graph))
    try:
        found = best_plan("auto", graph, request)
    except PlanError:
        return ratio(0.0, best.samples_per_second)
    assert found.fits
    assert found.lower_bound <= request.batch_size / best.samples_per_second * EQUAL, seed
    return ratio(found.samples_per_second, best.samples_per_second)


def test_a_sample_is_optimal() -> None:
    assert max(ratio_of(seed) for seed in range(5)) <= EQUAL


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
def test_500_problems() -> None:
    """At least 99.5 % are optimal, none is more than 2 % slower than the best."""
    ratios = [ratio_of(seed) for seed in range(500)]
    assert max(ratios) <= 1.02
    assert sum(ratio <= EQUAL for ratio in ratios) >= 0.995 * len(ratios)
