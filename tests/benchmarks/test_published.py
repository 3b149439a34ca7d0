"""The recurrences of the chain planners as plain loops: they judge the vectorised ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planners.published import LoopLevel, pipedream_in_loops, piper_in_loops
from lightning_gpp.planning import SearchControl
from lightning_gpp.planning.partitioners import pipedream, piper
from tests.planning.problems import random_problem
from tests.planning.test_pipedream import TWO_BY_TWO, chain_problem

PAIRS = {"pipedream": (pipedream.pipedream, pipedream_in_loops), "piper": (piper.piper, piper_in_loops)}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(30))
def test_loops_give_the_same_answers(name: str, seed: int) -> None:
    """Drafts, bottlenecks, alternatives, and numbers of transitions; also where nothing fits."""
    vectorised, in_loops = PAIRS[name]
    problem = replace(random_problem(seed), recompute=(None, True, False)[seed % 3])
    assert in_loops(problem, SearchControl()) == vectorised(problem, SearchControl())


def test_levels_are_filled_alike() -> None:
    """All cells and choices, on two nodes of two devices."""
    problem = chain_problem([0.3, 0.1, 0.7, 0.4, 0.2, 0.6, 0.5], TWO_BY_TWO, weights=300, crossing=20)
    for size in problem.sizes:
        ours = pipedream.solve(problem, size)
        loops = pipedream.solve(problem, size, LoopLevel)
        for level, other in zip(ours, loops, strict=True):
            for table in ("best", "cut", "share"):
                assert (getattr(level, table) == getattr(other, table)).all()
    assert len(ours) == 2
