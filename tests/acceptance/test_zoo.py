"""Architectures of many libraries and idioms, in the planner's stages: equal to one process, or refused in a sentence.

All of the zoo needs `pip install -e .[zoo]`; models of libraries that are not installed are left out.
"""

from __future__ import annotations

import re

import pytest

from tests.acceptance.harness import SCREEN, Outcome, run_zoo
from tests.acceptance.models import zoo

SAMPLE = ["llama", "expert_blocks", "own_function", "time_major_told"]

REFUSED = {
    "wav2vec2_masked": "draws random numbers by other means than torch",
    "experts": "nonzero",
    "packed_lstm": "_pack_padded_sequence",
    "gradient_penalty": "differentiates its network",
}
"""Models that no pipeline of stages can train as they are, with the reason that users read."""

OWN_DRAWS = "wav2vec2_masked"
"""Draws masks by NumPy, which a message tells, wherever it is not cut (and then is not refused)."""


def _check(outcomes: list[Outcome]) -> None:
    found = [outcome for outcome in outcomes if outcome.kind != "missing"]
    wrong = [outcome for outcome in found if outcome.kind not in ("passed", "micro-batches", "rounding", "refused")]
    assert [outcome for outcome in wrong if (outcome.kind, outcome.name) != ("draws", OWN_DRAWS)] == []
    refused = {outcome.name: outcome.message for outcome in found if outcome.kind == "refused"}
    assert set(refused) <= set(REFUSED)
    for name, message in refused.items():
        assert re.search(REFUSED[name], message), name
        assert len(message) <= SCREEN
    passed = [outcome for outcome in found if outcome.kind in ("passed", "micro-batches")]
    assert len(passed) >= 0.95 * len(found)


def test_a_few_models() -> None:
    pytest.importorskip("transformers")
    outcomes = run_zoo(2, SAMPLE)
    _check(outcomes)
    assert all(len(outcome.stages) == 2 for outcome in outcomes)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("processes", "max_replicas"), [(2, 1), (4, None)], ids=["two", "four"])
def test_all_models(processes: int, max_replicas: int | None) -> None:
    """Models with code in float32 inside prove their equality without replicas: see "rounding" in the harness."""
    outcomes = {outcome.name: outcome for outcome in run_zoo(processes, list(zoo()), max_replicas)}
    rounded = [name for name, outcome in outcomes.items() if outcome.kind == "rounding"]
    _check(list((outcomes | {outcome.name: outcome for outcome in run_zoo(processes, rounded, 1)}).values()))
