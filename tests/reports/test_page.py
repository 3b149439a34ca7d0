"""The report of a plan or a run: complete, in one file."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.report import report_html
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Link, Span, StageCosts, Timeline, simulate
from tests.strategies import towers


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    plan = towers(2, 2, 4)
    costs = replace(StageCosts.uniform(plan, forward=1, backward=2), default_link=Link(latency=0.25))
    timeline = simulate(compile_program(plan), costs)
    return Prediction(plan=plan, timeline=timeline, memory_bytes=(8.0,) * plan.num_devices)


def slower(timeline: Timeline, factor: float = 2) -> Timeline:
    """The same, measured on a machine that takes longer, with a clock that began earlier."""
    rows = (
        tuple(Span(span.action, 7 + factor * span.start, 7 + factor * span.stop) for span in spans)
        for spans in timeline.devices
    )
    return Timeline(stages=timeline.stages, devices=tuple(rows))


def tags(page: str) -> set[str]:
    found: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    return found


def test_the_page_needs_nothing_else(prediction: Prediction) -> None:
    page = report_html(prediction, title="a plan")
    assert not {"script", "link", "img", "a"} & tags(page)
    assert not re.search(r"@import|url\((?!#)|\$\w", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_names_and_notes_are_escaped(prediction: Prediction) -> None:
    stages = prediction.plan.stages
    plan = replace(prediction.plan, stages=(replace(stages[0], name="<b>&"), *stages[1:]))
    page = report_html(replace(prediction, plan=plan), title="<b>$title</b>", notes=["<b>note</b>"])
    assert "b" not in tags(page)
    assert "&lt;b&gt;note&lt;/b&gt;" in page


def test_a_run_has_both_timelines_on_one_axis(prediction: Prediction) -> None:
    page = report_html(prediction, title="a run", measured=[slower(prediction.timeline)])
    first = re.findall(r"<title>4F0 stage4: ([\d.]+) s to ([\d.]+) s", page)
    assert [(float(start), float(stop)) for start, stop in first] == [(2.75, 3.75), (5.5, 7.5)]
    assert "Simulated and measured" in page
    assert re.search(r"all +\| step .* 2\.00 \|", page)
