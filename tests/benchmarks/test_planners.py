"""The planners' benchmarks on small input: that they run, and the figures that are exact."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planners import case_study, optimality
from benchmarks.planners.common import Hardware, run
from benchmarks.workloads import graph


def test_samples_in_place_weigh_nothing_and_change_no_costs() -> None:
    machine = Hardware(flops=40e12, seconds_per_operator=20e-6, network=1e9)
    sent, in_place = (replace(machine, in_place=choice).problem(graph("candle_uno"), 8, 64) for choice in (False, True))
    assert sum(value.bytes.at(8) for value in sent.units.data) > 0
    assert sum(value.bytes.at(8) for value in in_place.units.data) == 0
    assert (sent.seconds(8).total == in_place.seconds(8).total).all()
    ours, theirs = (run("pipedream", problem).samples_per_second for problem in (in_place, sent))
    assert ours > theirs


def test_samples_in_flight_are_those_of_the_authors() -> None:
    rows, line = case_study.in_flight()
    assert "| graph | 192 | 192 | 192 | 192 | 128 | 64 |" in rows
    assert line.endswith(": met.")


def test_fewest_in_flight_of_a_diamond() -> None:
    diamond = [[1, 2], [3], [3], []]
    assert optimality.fewest([1, 1, 1, 1], diamond, 2, 8) == [3, 2, 2, 1]
    assert optimality.step_seconds([1, 1], [[1], []], [1, 1], 1, 4) > optimality.step_seconds(
        [1, 1], [[1], []], [2, 1], 1, 4
    )


def test_sections_of_optimality_on_a_few_problems() -> None:
    for section in (
        optimality.against_all_plans,
        optimality.graphpipe_in_its_space,
        optimality.fewest_in_flight,
    ):
        *_, line = section(4, 1.0)
        assert "NOT" not in line
