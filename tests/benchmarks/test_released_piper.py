"""The search of `piper` with its release's costs: against what the release answers, and against a judge of plans."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planners.released_piper import (
    Case,
    Profile,
    estimated,
    objective,
    optimum,
    question,
    simulated,
)
from tests.benchmarks.piper_profiles import towers, transformer

CHAIN, BRANCHES = transformer(16), towers(3, 5)

RELEASED = [
    (CHAIN, 8, 80, 0.0619479217),
    (CHAIN, 8, 8, 0.0718235595),
    (CHAIN, 8, 6, 0.0769857448),
    (CHAIN, 12, 4, 0.0572245149),
    (CHAIN, 16, 3, 0.0419470409),
    (CHAIN, 24, 3, 0.028001326),
    (BRANCHES, 8, 80, 0.061752043),
    (BRANCHES, 8, 8, 0.0719059425),
    (BRANCHES, 8, 6, 0.0770059425),
    (BRANCHES, 12, 4, 0.0566284685),
    (BRANCHES, 16, 3, 0.0419470409),
    (BRANCHES, 24, 3, 0.028001326),
]
"""Profiles, devices, GiB of each, and the seconds per micro-batch that the release finds (commit d7fc8cf)."""


@pytest.mark.parametrize(("content", "devices", "gibibytes", "released"), RELEASED)
def test_the_optimum_is_that_of_the_release(
    content: dict[str, Any], devices: int, gibibytes: float, released: float
) -> None:
    profile = Profile.of(content, Case("", devices, gibibytes))
    seconds, stages = optimum(profile, devices)
    assert seconds == pytest.approx(released, rel=1e-6)
    plan = [(frozenset(stage.units), stage.replicas) for stage in stages]
    assert objective(profile, plan) == pytest.approx(seconds)


def test_no_plan_fits_where_the_release_finds_none() -> None:
    profile = Profile.of(CHAIN, Case("", 8, 1))
    assert optimum(profile, 8) == (inf, [])
    assert objective(profile, [(frozenset(range(18)), 8)]) == inf


def test_steps_are_near_the_objective(tmp_path: Path) -> None:
    path, case = tmp_path / "chain.json", Case("", 4, 80)
    path.write_text(json.dumps(CHAIN))
    profile = Profile.of(CHAIN, case)
    graph, request = question(path, profile, case, 2.0)
    seconds, stages = optimum(profile, 4)
    step = simulated(graph, request)
    assert step == pytest.approx(seconds, rel=0.1)
    assert step <= estimated(graph, request, profile, stages) * (1 + request.simplicity) < inf
