from xml.etree import ElementTree

from lightning_gpp.plan import Plan
from lightning_gpp.planning import manual
from lightning_gpp.reports import graph_svg, graph_text, timeline_svg, timeline_text
from lightning_gpp.reports.units import ticks
from lightning_gpp.schedules import compile_program, lower
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from tests.planning import graphs
from tests.strategies import chain, schedule_of


def chain_plan(schedule: str = "gpipe") -> Plan:
    return manual(graphs.chain(2), {"blocks.0": 0, "blocks.1": 1}, batch_size=3, micro_batch_size=1, schedule=schedule)


def timeline_of(plan: Plan) -> Timeline:
    return simulate(compile_program(plan), StageCosts.uniform(plan, forward=1, backward=2))


def test_gantt_in_text() -> None:
    assert timeline_text(timeline_of(chain_plan()), width=69).splitlines() == [
        "device 0 |...F0==F1=F2==B0====B1=====B2=====.......| idle 25 %, 3 B",
        "device 1 |F0=F1==F2=..........B0=====B1=====B2=====| idle 25 %, 3 B",
        "         0                                     12 s",
        "step 12 s, idle 25 %",
    ]


def test_neighbours_without_room_for_their_names_share_one() -> None:
    plan = chain([1, 1], 32)
    text = timeline_text(simulate(compile_program(plan), StageCosts.uniform(plan, 1, 2)), width=60)
    assert text.startswith("device 0 |F0-31=B0-31====")


def test_stages_that_share_a_device_are_told_apart() -> None:
    placement = [{"modules": ["blocks.0"], "devices": [0]}, {"modules": ["blocks.1"], "devices": [0]}]
    plan = manual(graphs.chain(2), placement, batch_size=2, micro_batch_size=1)
    text = timeline_text(timeline_of(plan), width=150)
    assert "0F0" in text
    assert "1B1" in text


def test_empty_timeline() -> None:
    assert "step 0 s" in timeline_text(Timeline(stages=(), devices=((),)))


def test_graph_in_text_shows_what_is_parallel() -> None:
    plan = manual(graphs.two_towers(), {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=4, micro_batch_size=1)
    assert graph_text(plan) == (
        "level 0: 0 image_tower (device 2) | 1 text_tower (device 1)\n"
        "level 1: 2 head (device 0)\n"
        "    image_tower -> head: 256 B both ways\n"
        "    text_tower -> head: 256 B both ways"
    )


def test_pictures_are_well_formed_and_complete() -> None:
    plan = manual(graphs.two_towers(), {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=4)
    names = {element.text for element in ElementTree.fromstring(graph_svg(plan.chained())).iter()}
    assert {"0 image_tower", "1 text_tower", "2 head", "device 0", "image_tower"} <= names
    picture = ElementTree.fromstring(timeline_svg(timeline_of(plan)))
    titles = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert sum("F" in (title or "")[:3] or "B" in (title or "")[:3] for title in titles) == 2 * 3 * 4
    assert any((title or "").startswith("0F0 image_tower: 0 s to 1 s") for title in titles)


def test_split_backwards_in_text_and_picture() -> None:
    """Two stages, two micro-batches; gradients of parameters come later."""
    plan = chain([1, 1], 2)
    schedule = schedule_of("0: 1F0 1I0 1F1 1I1 1W0 1W1\n1: 0F0 0F1 0I0 0W0 0I1 0W1")
    timeline = simulate(lower(plan, schedule), StageCosts.uniform(plan, 1, 2, 1))
    assert timeline_text(timeline, width=60).splitlines() == [
        "device 0 |.....F0==I0===F1==I1===W0==W1===| idle 14 %, 2 B",
        "device 1 |F0===F1==.....I0==W0===I1==W1===| idle 14 %, 2 B",
        "         0                             7 s",
        "step 7 s, idle 14 %",
        "F forward, I input gradients, W weight gradients",
    ]
    picture = timeline_svg(timeline)
    assert picture.count('fill="url(#hatch)"') == 4 + 1  # every W, and the legend
    assert "<title>0W1 stage0: 6 s to 7 s</title>" in picture


def test_ticks_are_round_and_have_units() -> None:
    assert [label for _, label in ticks(0.0237, 5)] == ["0", "5 ms", "10 ms", "15 ms", "20 ms"]
    assert [label for _, label in ticks(1.8, 4)] == ["0", "0.5 s", "1 s", "1.5 s"]
    assert ticks(0, 5) == [(0.0, "0")]


def test_names_are_escaped() -> None:
    placement = [{"name": "<a&b>", "modules": [""]}]
    ElementTree.fromstring(graph_svg(manual(graphs.chain(2), placement, batch_size=4)))
