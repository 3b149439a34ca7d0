"""Timelines as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_gpp.errors import ScheduleError
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.strategies import towers


@pytest.fixture
def timeline() -> Timeline:
    plan = towers(2, 2, 4)
    return simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))


def test_json_round_trip(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline


def test_not_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"stages": []}')
    with pytest.raises(ScheduleError, match=r"other.json is not a timeline: KeyError.*Timeline.save"):
        Timeline.load(tmp_path / "other.json")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="missing.json cannot be read"):
        Timeline.load(tmp_path / "missing.json")


def test_trace(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, timeline.devices)) + len(timeline.transfers)
    head = next(event for event in spans if event["name"] == "4F0")
    assert (head["pid"], head["tid"], head["ts"], head["dur"]) == (0, 0, 2e6, 1e6)
    assert head["args"] == {"stage": "stage4", "kind": "FORWARD"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M" and event["pid"] == 0} == {
        "device 0",
        "compute",
        "receive from device 1",
        "receive from device 3",
    }


def test_empty() -> None:
    empty = Timeline(stages=(), devices=((),))
    assert (empty.makespan, empty.busy, empty.bubble_fractions) == (0, (0,), (0,))
