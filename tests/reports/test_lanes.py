"""Split backwards, recomputations and collectives in text, pictures and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from lightning_gpp.plan import Plan
from lightning_gpp.reports import timeline_svg, timeline_text
from lightning_gpp.schedules import Action, Kind, Schedule, compile_program, lower
from lightning_gpp.simulation import Collective, Span, StageCosts, Timeline, simulate, trace_of
from tests.strategies import chain, plan_of


def split() -> Timeline:
    """Two stages, two micro-batches; gradients of parameters come later."""
    plan = chain([1, 1], 2)
    schedule = Schedule.parse("0: 1F0 1I0 1F1 1I1 1W0 1W1\n1: 0F0 0F1 0I0 0W0 0I1 0W1")
    return simulate(lower(plan, schedule), StageCosts.uniform(plan, 1, 2, 1))


def sharded_plan() -> Plan:
    plan = plan_of([(0, 1), (1, 2)], [2, 2, 2], 4, devices=[(1, 2), (1, 2), (0,)])
    stages = tuple(replace(stage, recompute=index == 1) for index, stage in enumerate(plan.stages))
    return replace(plan, stages=stages, sharding="fsdp")


def sharded() -> Timeline:
    """Devices 1 and 2 hold two stages, gather their parameters in a second each, and sum their gradients."""
    plan = sharded_plan()
    return simulate(compile_program(plan), replace(StageCosts.uniform(plan, 1, 2), all_reduce=(2.0, 2.0, 0.0)))


def test_split_backwards_in_text() -> None:
    assert timeline_text(split(), width=60).splitlines() == [
        "device 0 |.....F0==I0===F1==I1===W0==W1===| idle 14 %, 2 B",
        "device 1 |F0===F1==.....I0==W0===I1==W1===| idle 14 %, 2 B",
        "         0                             7 s",
        "step 7 s, idle 14 %; warm-up/peak in flight: stage0 2/2,",
        "    stage1 1/2",
        "F forward, I input gradients, W weight gradients",
    ]


def test_collectives_lie_below_their_device() -> None:
    lines = timeline_text(sharded(), width=120).splitlines()
    assert [line[:10].strip() for line in lines[:5]] == ["device 0 |", "device 1 |", "|", "device 2 |", "|"]
    lane = lines[2].split("|")[1]
    assert lane == lines[4].split("|")[1]
    assert lane.startswith("U0")
    assert lane.rstrip("= ").endswith("G0")
    assert lane.count("U") == 2
    assert lines[1].split("|")[1].startswith(".")  # the first forward waits for its parameters
    assert lines[-1] == "F forward, R forward again, B backward, U gather parameters, G reduce gradients"


def test_what_was_measured_of_collectives_are_marks() -> None:
    spans = (
        Span(Action(0, Kind.UNSHARD, 0), 0.0, 0.0),
        Span(Action(0, Kind.FORWARD, 0), 0.0, 1.0),
        Span(Action(0, Kind.BACKWARD, 0), 1.0, 3.0),
        Span(Action(0, Kind.REDUCE, 0), 3.0, 3.0),
        Span(Action(0, Kind.RESHARD, 0), 3.0, 3.0),
    )
    bar, lane, *_, legend = timeline_text(Timeline(stages=("a",), devices=(spans,)), width=90).splitlines()
    assert bar.split("|")[1].replace("=", "") == "F0B0"
    assert lane.split("|")[1][0] == "U"
    assert lane.split("|")[1][-1] == "S"
    assert legend == "F forward, B backward, U gather parameters, S free parameters, G reduce gradients"
    ElementTree.fromstring(timeline_svg(Timeline(stages=("a",), devices=(spans,))))


def titles(picture: str) -> list[str]:
    tags = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")
    return [element.text or "" for element in tags]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_split_backwards_in_the_picture() -> None:
    picture = timeline_svg(split())
    assert picture.count('fill="url(#hatch)"') == 4 + 1  # every W, and the legend
    assert {"F0", "I0", "W1", "W weight gradients"} <= set(texts(picture))
    assert "0W1 stage0: 6 s to 7 s" in titles(picture)


def test_collectives_in_the_picture() -> None:
    timeline = sharded()
    found = titles(timeline_svg(timeline))
    assert sum(title.startswith("gather parameters, stage") for title in found) == len(timeline.all_gathers) == 4
    number = sum(len(entry.devices) for entry in timeline.reductions)
    assert sum(title.startswith("reduce gradients, stage") for title in found) == number > 0
    assert "U gather parameters" in texts(timeline_svg(timeline))


def test_collectives_have_a_row_of_their_own_in_traces() -> None:
    timeline = sharded()
    events = trace_of(timeline).events
    rows = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    row = rows["gather parameters of stage0"]
    assert rows["reduce gradients of stage1"] == row
    assert row not in {tid for name, tid in rows.items() if "stage" not in name}
    labels = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {key for key, name in labels.items() if name == "collectives"} == {(1, row), (2, row)}
    again = next(event for event in events if event["name"] == "1R0")
    assert (again["cat"], again["tid"]) == ("recompute", 0)


def test_rows_of_a_trace_do_not_overlap() -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace_of(sharded()).events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(first[1] <= second[0] + 1e-6 for first, second in zip(spans, spans[1:], strict=False))


def test_all_gathers_count_and_are_kept(tmp_path: Path) -> None:
    timeline = sharded()
    assert timeline.all_gathers[0] == Collective(0, (1,), 0, 1)
    assert timeline.start == 0  # nothing computes in the first second
    assert min(spans[0].start for spans in timeline.devices) == 1
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    assert simulate(compile_program(sharded_plan()), StageCosts.uniform(sharded_plan())).all_gathers == ()
