"""What users do with a trainer: on two ranks all facts are those of one process, or it is refused in a sentence."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.acceptance.scenarios import scenarios
from tests.acceptance.scenarios.marks import MARKS, REFUSED, WAYS_OUT, mark_of
from tests.acceptance.scenarios.runner import Outcome, run_scenarios

SAMPLE = """
order_of_hooks hook_ClipsAll callback_early_stopping log_of_own_size gathered batch_nested step_Adversarial
whole_accumulates resumed_within_an_epoch exception_in_a_hook habit_DrawsBehind habit_SetsRate refused_squares
kept_decides
""".split()  # noqa: SIM905  a list of so many words is easier to read
"""Some of each kind."""

PACKAGES = {"tensorboard": "tensorboard"}
"""Packages that scenarios need, and the tests otherwise do not."""


def _check(outcomes: list[Outcome]) -> None:
    """Every scenario ends as its mark says."""
    wrong = [each for each in outcomes if each.kind != mark_of(each.name)]
    assert wrong == []
    told = {each.name: each.message for each in outcomes if each.kind == REFUSED}
    assert all(WAYS_OUT[name] in message for name, message in told.items()), told


def test_marks_are_those_of_scenarios() -> None:
    assert MARKS.keys() <= set(scenarios())


def test_a_few() -> None:
    _check(run_scenarios(SAMPLE))


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_all() -> None:
    """All scenarios whose packages are installed."""
    absent = {name for name, package in PACKAGES.items() if find_spec(package) is None}
    _check(run_scenarios([name for name in scenarios() if name not in absent]))
