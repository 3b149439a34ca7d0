"""Plans do not become slower: step times of random requests, against those of an earlier version."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

import pytest

from benchmarks.planners.plans import EVALUATIONS, GROUPS, SECONDS, Case, random_requests, ratio, step_seconds
from lightning_gpp.planning.problem import partitioner

EARLIER = json.loads((Path(__file__).parent / "step_times.json").read_text())
"""Seconds by request of `benchmarks.planners.plans`, from searches of as many evaluations; None without a plan."""

SAME = 1 + 1e-5
"""Step times are recorded with six digits."""

CASES = [(label, case) for label, case in random_requests() if int(label.split()[1]) % 10 == 5]


@pytest.mark.parametrize(("label", "case"), CASES, ids=[label for label, _ in CASES])
def test_no_step_is_longer(label: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "EVALUATIONS_PER_SECOND", EVALUATIONS / SECONDS)
    assert ratio(EARLIER[label], step_seconds(case)) <= SAME


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", GROUPS)
def test_steps_of_a_group_are_as_short(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "EVALUATIONS_PER_SECOND", EVALUATIONS / SECONDS)
    ratios = {label: ratio(EARLIER[label], step_seconds(case)) for label, case in GROUPS[group]()}
    assert geometric_mean(value or 1.0 for value in ratios.values()) <= 1.01  # 0: a plan where there was none
    assert not {label: value for label, value in ratios.items() if value > 1.05}
