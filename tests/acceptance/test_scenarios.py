"""What users do with a trainer: on two ranks all facts are those of one process, or it is refused in a sentence."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.acceptance.scenarios import scenarios
from tests.acceptance.scenarios.marks import MARKS, REFUSED, WAYS_OUT, mark_of
from tests.acceptance.scenarios.runner import Outcome, run_scenarios

SAMPLE = [
    *("flag_accumulate", "flag_overfit", "flag_fast_dev_run", "flag_simple_profiler", "order_of_hooks", "two_fits"),
    *(
        "hook_ClipsAll",
        "hook_Freezes",
        "hook_ReadsWeights",
        "hook_Transfers",
        "callback_early_stopping",
        "callback_stops",
    ),
    *("callback_averages", "log_of_own_size", "log_sum", "metric_objects", "gathered", "read_once", "no_batches"),
    *("stream_validated", "batch_nested", "step_Adversarial", "step_Manual", "step_Tied", "whole_ReturnsNone"),
    *("writer_both", "saved_two_best", "resumed_within_an_epoch", "exception_in_a_hook", "pickled_after_fit"),
    *("in_place_split", "pruned_before", "results_read_in_micro_batches", "texts_to_modules"),
    *("averages_in_a_checkpoint", "whole_habit_OwnGenerators"),
    *("habit_FreezesInStep", "habit_Noise", "habit_Norms", "habit_ClipsGroups", "habit_LogsSome", "habit_GrowsGroup"),
    *("undivided_Clouds", "undivided_EvaluatesGraph", "undivided_skips", "undivided_remembers", "undivided_mixed"),
    *("undivided_physics", "filled_nested", "filled_inside", "filled_object"),
    *("refused_squares", "refused_teacher", "refused_early_metric", "refused_late_gradient_hook"),
    *("refused_freezes_without_flush", "refused_kept_by_hook"),
    *(name for name in scenarios() if name.startswith("kept_")),
    *(name for name in scenarios() if name.startswith("idiom_")),
]
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
