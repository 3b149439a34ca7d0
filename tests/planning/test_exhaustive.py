"""All plans, or as many as there is time for."""

from __future__ import annotations

from lightning_gpp.planning import SearchControl
from lightning_gpp.planning.partitioners.exhaustive import exhaustive
from tests.planning.problems import random_problem


def test_the_best_of_those_tried_in_time_and_a_note() -> None:
    problem = random_problem(4, num_units=5, num_devices=4)
    everything, some = (
        exhaustive(problem, SearchControl(seconds=float("inf"))),
        exhaustive(problem, SearchControl(seconds=0.0)),
    )
    assert everything.notes == ()
    assert some.states < everything.states
    assert some.objective >= everything.objective
    assert "Not all plans were tried in strategy.search_seconds=0 seconds" in some.notes[0]
