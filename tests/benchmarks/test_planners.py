"""The planners' benchmarks on small input: that they run, and the figures that are exact."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.planners import calibrate, case_study, optimality, released
from benchmarks.planners.common import Hardware, powers_of_two, problem_of, run, table, typical_deviation
from benchmarks.planners.figure6 import agrees
from benchmarks.planners.paper import BATCH_SIZES, NUM_DEVICES
from benchmarks.workloads import graph
from benchmarks.workloads.__main__ import main as workloads_main
from lightning_gpp.graph import OperatorGraph


def test_clusters_and_micro_batches_are_the_papers() -> None:
    machine = Hardware(flops=1e12, seconds_per_operator=0.0, network=1e9, shared="node")
    cluster = machine.cluster(8)
    assert cluster.num_devices == 8
    assert cluster.link(0, 3).bytes_per_second == 50e9
    assert cluster.link(3, 4).bytes_per_second == 1e9
    assert powers_of_two(48) == (1, 2, 4, 8, 16)


def test_the_released_planner_gets_the_units_as_a_chain() -> None:
    machine = Hardware(flops=40e12, seconds_per_operator=20e-6, network=6.25e9)
    problem = problem_of("candle_uno", machine.cluster(4), 64)
    lines = released.profile(problem, 8).splitlines()
    assert len(lines) == 2 * problem.num_units - 1
    milliseconds = [float(figure) for line in lines for figure in re.findall(r"compute_time=([^,]+),", line)]
    assert sum(milliseconds) == pytest.approx(1e3 * problem.seconds(8).total.sum())
    assert lines[-1].split() == ["node31", "--", "node32"]


def test_workloads_are_written_for_gpp_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["workloads", "candle_uno_2"])
    workloads_main()
    assert list(OperatorGraph.from_json(capsys.readouterr().out)) == list(graph("candle_uno_2"))


def test_refusals_have_no_prediction() -> None:
    machine = Hardware(flops=40e12, seconds_per_operator=20e-6, network=6.25e9)
    refused = run("piper", problem_of("candle_uno", machine.cluster(4), 64))
    assert refused.prediction is None
    assert "downsets" in refused.answer.notes[0]


def test_samples_in_place_weigh_nothing_and_change_no_costs() -> None:
    machine = Hardware(flops=40e12, seconds_per_operator=20e-6, network=1e9)
    sent, in_place = (replace(machine, in_place=choice).problem(graph("candle_uno"), 8, 64) for choice in (False, True))
    assert sum(value.bytes.at(8) for value in sent.units.data) > 0
    assert sum(value.bytes.at(8) for value in in_place.units.data) == 0
    assert (sent.seconds(8).total == in_place.seconds(8).total).all()
    ours, theirs = (run("pipedream", problem).samples_per_second for problem in (in_place, sent))
    assert ours > theirs


def test_mini_batches_grow_no_faster_than_the_devices() -> None:
    for model, sizes in BATCH_SIZES.items():
        for index, number in enumerate(NUM_DEVICES):
            assert sizes[index] in calibrate.choices(model, number, sizes[:index])
    assert calibrate.choices("mmt", 8, (64,)) == (128,)
    assert calibrate.choices("mmt", 8, (32,)) == ()
    assert calibrate.choices("dlrm", 16, (512,)) == (512, 1024)


def test_of_paths_alike_the_larger_mini_batches_are_taken() -> None:
    assert calibrate.best(((0.01, (64, 128)), (0.01, (128, 128)), (0.02, (128, 256)))) == (0.01, (128, 128))


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
        optimality.against_all_plans,
        optimality.graphpipe_in_its_space,
        optimality.fewest_in_flight,
    ):
        *_, line = section(4, 1.0)
        assert "NOT" not in line


def test_tables_are_markdown() -> None:
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
