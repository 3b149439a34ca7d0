"""Plans do not become slower: step times of random requests, against those of an earlier version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planners.plans import MAX_EVALUATIONS, Case, random_requests, ratio, step_seconds
from lightning_gpp.planning.partitioners.auto import search

EARLIER = json.loads((Path(__file__).parent / "step_times.json").read_text())
"""Seconds by request of `benchmarks.planners.plans`, from searches of as many evaluations; None without a plan."""

CASES = [(label, case) for label, case in random_requests() if int(label.split()[1]) % 5 == 0]


@pytest.mark.parametrize(("label", "case"), CASES, ids=[label for label, _ in CASES])
def test_no_step_is_longer(label: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_EVALUATIONS", MAX_EVALUATIONS)
    assert ratio(EARLIER[label], step_seconds(case)) <= 1 + 1e-5
