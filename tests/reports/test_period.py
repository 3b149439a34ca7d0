"""Reports of a pipeline that does not flush show its fill, period and drain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.planning import Prediction
from lightning_gpp.reports import prediction_text
from lightning_gpp.reports.report import report_html
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate, simulate_period
from tests.strategies import chain


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """A chain of four equal stages, whose devices always compute once the pipeline is full."""
    plan = chain([1] * 4, 4)
    costs = StageCosts.uniform(plan, forward=1, backward=2)
    costs = replace(costs, stages=tuple(replace(stage, parameter_bytes=100) for stage in costs.stages))
    timeline = simulate(compile_program(plan), costs)
    return Prediction(plan=plan, timeline=timeline, period=simulate_period(plan, costs, weight_copies=lambda d: d))


def test_idle_time_is_that_of_the_period(prediction: Prediction) -> None:
    assert prediction.timeline.bubble_fraction > 0.4
    assert prediction.idle == pytest.approx(0)
    assert prediction.idle_fractions == pytest.approx([0] * 4)
    assert "Without a flush: 12 s per mini-batch" in report_html(prediction, title="a plan")


def test_several_mini_batches_are_drawn(prediction: Prediction) -> None:
    assert prediction.period is not None
    number = prediction.drawn.num_batches
    assert number >= 3
    assert f"{number} mini-batches without a flush" in prediction_text(prediction)
    last = max(span.action.micro_batch for span in prediction.drawn.devices[0])
    assert last == 4 * number - 1
    assert prediction.drawn.makespan == pytest.approx(number * prediction.seconds + prediction.period.fill_and_drain)


def test_memory_counts_copies_of_weights(prediction: Prediction) -> None:
    assert prediction.period is not None
    without = simulate_period(prediction.plan, StageCosts.uniform(prediction.plan, forward=1, backward=2))
    for device, peak in enumerate(prediction.peak_bytes):
        stage = prediction.plan.stages_on(device)[0]
        more = (4 + prediction.period.copies[stage]) * 100  # weights, gradients and state, and the copies
        assert peak == pytest.approx(without.peak_bytes[device] + more)
