"""Timelines as traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Collective, Link, StageCosts, Timeline, simulate, trace_of
from tests.strategies import plan_of, towers


@pytest.fixture
def timeline() -> Timeline:
    plan = towers(2, 2, 4)
    return simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2))


def test_trace(timeline: Timeline, tmp_path: Path) -> None:
    """Every action and message, with the names of devices."""
    trace_of(timeline).save(tmp_path / "trace.json")
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


def delayed() -> Timeline:
    """Two towers whose messages take half a second."""
    plan = towers(2, 2, 4)
    costs = replace(StageCosts.uniform(plan, 1, 2), default_link=Link(latency=0.5))
    return simulate(compile_program(plan), costs)


def test_events_of_a_trace_are_in_order_and_complete() -> None:
    events = trace_of(delayed()).events
    assert [event["ph"] for event in events].count("M") == [event["ph"] == "M" for event in events].index(False)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def sharded() -> Timeline:
    """Devices 1 and 2 hold two stages, gather their parameters in a second each, and sum their gradients."""
    plan = plan_of([(0, 1), (1, 2)], [2, 2, 2], 4, devices=[(1, 2), (1, 2), (0,)])
    stages = tuple(replace(stage, recompute=index == 1) for index, stage in enumerate(plan.stages))
    plan = replace(plan, stages=stages, sharding="fsdp")
    return simulate(compile_program(plan), replace(StageCosts.uniform(plan, 1, 2), all_reduce=(2.0, 2.0, 0.0)))


def test_collectives_have_a_row_of_their_own_in_traces() -> None:
    timeline = sharded()
    assert timeline.all_gathers[0] == Collective(0, (1,), 0, 1)
    assert min(spans[0].start for spans in timeline.devices) == 1  # nothing computes in the first second
    events = trace_of(timeline).events
    rows = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    row = rows["gather parameters of stage0"]
    assert rows["reduce gradients of stage1"] == row
    assert row not in {tid for name, tid in rows.items() if "stage" not in name}
    labels = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {key for key, name in labels.items() if name == "collectives"} == {(1, row), (2, row)}
