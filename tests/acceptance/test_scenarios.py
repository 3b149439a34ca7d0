"""What users do with a trainer: on two ranks all facts are those of one process, or it is refused in a sentence."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.acceptance.scenarios import scenarios
from tests.acceptance.scenarios.marks import MARKS, REFUSED, WAYS_OUT, mark_of
from tests.acceptance.scenarios.runner import Outcome, run_scenarios

SAMPLE = """
flag_fast_dev_run order_of_hooks hook_ClipsAll weights_in_a_hook callback_early_stopping callback_averages
log_of_own_size metric_objects gathered read_once batch_nested batch_data_class step_Adversarial step_Tied
whole_ReturnsNone whole_accumulates whole_OwnBackward writer_both saved_two_best resumed_within_an_epoch
exception_in_a_hook in_place_split texts_to_modules
whole_habit_OwnGenerators habit_DrawsBehind habit_ClipsGroups undivided_EvaluatesGraph undivided_skips filled_list
refused_squares refused_early_metric kept_collects kept_decides idiom_Rotates
""".split()  # noqa: SIM905  a list of so many words is easier to read
"""One of each kind."""

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
