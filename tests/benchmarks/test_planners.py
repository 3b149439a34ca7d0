"""The planners' benchmarks on small input: that they run, and the figures that are exact."""

from __future__ import annotations

import pytest

from benchmarks.planners import case_study, optimality
from benchmarks.planners.common import Hardware, powers_of_two, problem_of, run, table, typical_deviation
from benchmarks.planners.figure6 import agrees


def test_clusters_and_micro_batches_are_the_papers() -> None:
    machine = Hardware(flops=1e12, seconds_per_operator=0.0, network=1e9, shared="node")
    cluster = machine.cluster(8)
    assert cluster.num_devices == 8
    assert cluster.link(0, 3).bytes_per_second == 50e9
    assert cluster.link(3, 4).bytes_per_second == 1e9
    assert powers_of_two(48) == (1, 2, 4, 8, 16)


def test_refusals_have_no_outcome() -> None:
    machine = Hardware(flops=40e12, seconds_per_operator=20e-6, network=6.25e9)
    refused = run("piper", problem_of("candle_uno", machine.cluster(4), 64))
    assert refused.outcome is None
    assert "downsets" in refused.answer.notes[0]


def test_agreement_needs_the_same_side_and_size() -> None:
    assert agrees(1.2, 1.3)
    assert not agrees(0.9, 1.05)
    assert not agrees(1.2, 1.6)
    assert typical_deviation([2.0, 1.0], [1.0, 2.0]) == pytest.approx(1.0)


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
        optimality.against_exhaustive,
        optimality.graphpipe_in_its_space,
        optimality.fewest_in_flight,
    ):
        *_, line = section(4, 1.0)
        assert "NOT" not in line


def test_tables_are_markdown() -> None:
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
