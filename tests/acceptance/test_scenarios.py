"""What users do with a trainer: on two ranks all facts are those of one process, or it is refused in a sentence."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.acceptance.scenarios import scenarios
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
    *("in_place_split", "pruned_before"),
    *(name for name in scenarios() if name.startswith("idiom_")),
]
"""One of each kind."""

PACKAGES = {"tensorboard": "tensorboard"}
"""Packages that scenarios need, and the tests otherwise do not."""

REFUSED = {
    "batch_size_found": "gpp-plan",
    "batch_size_tuned": "gpp-plan",
    "callback_pruning": "Prune the module before trainer.fit",
    "hook_NormOfWeights": "with lightning_gpp.summon_full_params(module):",
    "step_Quasi": "L-BFGS",
    "whole_Quasi": "L-BFGS",
    "step_ReturnsNone": "return a zero loss",
    "loader_single_samples": "More micro-batches than samples",
}
"""Scenarios that are refused on two ranks, with words of the way out or of the reason."""


def _check(outcomes: list[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if outcome.kind not in ("same", "refused")]
    assert wrong == []
    refused = {outcome.name: outcome.message for outcome in outcomes if outcome.kind == "refused"}
    assert all(REFUSED.get(name, "nothing") in message for name, message in refused.items()), refused


def test_a_few() -> None:
    _check(run_scenarios(SAMPLE))


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_all() -> None:
    """All scenarios whose packages are installed."""
    absent = {name for name, package in PACKAGES.items() if find_spec(package) is None}
    _check(run_scenarios([name for name in scenarios() if name not in absent]))
