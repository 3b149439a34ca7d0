"""The report of a plan or a run: complete, in one file, and drawn by a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.measured import compare_timelines
from lightning_gpp.reports.page import RunRecord, report_html
from lightning_gpp.reports.page.curves import curve_svg, round_figures
from lightning_gpp.reports.ranks import MeasuredRanks, RankTimes
from lightning_gpp.reports.remarks import idle_times, remarks
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


class Elements(HTMLParser):
    """Links to other files, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.data, self._inside = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self._inside = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def test_the_page_needs_nothing_else(prediction: Prediction) -> None:
    page = report_html(prediction, title="a plan")
    assert not Elements(page).links
    assert not re.search(r"@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 100_000


def test_the_data_are_those_of_the_timeline(prediction: Prediction) -> None:
    """Every action and message, memory over time up to its peak, in JSON."""
    data = json.loads(Elements(report_html(prediction, title="a plan")).data)
    timeline, drawn = prediction.timeline, data["timelines"]["simulated"]
    for spans, row in zip(timeline.devices, drawn["devices"], strict=True):
        assert [(str(span.action), span.start, span.stop) for span in spans] == [
            (f"{stage}{kind}{number}", start, stop) for stage, kind, number, start, stop in row
        ]
    assert len(drawn["messages"]) == len(timeline.transfers)
    assert all(stop - start == 0.25 for *_, start, stop, _ in drawn["messages"])
    assert [max(held for _, held in curve) for curve in drawn["memory"]] == list(timeline.peak_bytes)
    assert data["limits"] == [8] * 5
    assert "measured" not in data["timelines"]


def test_names_cannot_end_the_script(prediction: Prediction) -> None:
    stages = prediction.plan.stages
    plan = replace(prediction.plan, stages=(replace(stages[0], name="</script><b>&"), *stages[1:]))
    page = Elements(report_html(replace(prediction, plan=plan), title="<b>title</b>"))
    assert json.loads(page.data)["stages"][0]["name"] == "</script><b>&"
    assert "b" not in page.tags


def test_a_run_shows_losses_throughput_and_the_measured_step(prediction: Prediction) -> None:
    record = RunRecord(curves={"train/loss": [(1, 2.0), (2, float("nan")), (3, 1.0)]}, samples_per_second=[(1, 10.0)])
    measured = [slower(prediction.timeline)]
    page = report_html(prediction, title="a run", measured=measured, run=record)
    data = json.loads(Elements(page).data)["timelines"]
    assert data["measured"]["seconds"] == 2 * data["simulated"]["seconds"]
    assert data["measured"]["devices"][0][0][3] == 2 * data["simulated"]["devices"][0][0][3]
    assert "train/loss" in page
    assert "last 1" in page
    assert "measured, median" in page
    assert "takes 2 times the simulated one" in page


def test_a_run_shows_its_devices(prediction: Prediction) -> None:
    times = [
        RankTimes(computing=[seconds] * 150, waiting=[0.25] * 150, longest=["rank 1: tensors of micro-batch 0"] * 150)
        for seconds in (1.0, 2.0)
    ]
    record = RunRecord(ranks=MeasuredRanks(first=0, ranks=times))
    page = report_html(prediction, title="a run", run=record)
    assert "Medians of 150 mini-batches" in page
    assert "the latest 100 mini-batches" in page
    assert page.count("<td>rank 1: tensors of micro-batch 0</td>") == 2 + 100
    assert "Devices of the run" not in report_html(prediction, title="a run", run=RunRecord())


def test_idle_time_is_explained_completely(prediction: Prediction) -> None:
    """Warm-up, waits and drain add up to the idle time of every device."""
    timeline = prediction.timeline
    totals = [idle.total for idle in idle_times(timeline)]
    assert totals == pytest.approx(timeline.bubble_fractions)
    idlest = max(range(len(totals)), key=totals.__getitem__)
    assert remarks(prediction)[0].startswith(f"Device {idlest} idles {100 * totals[idlest]:.0f} %: ")


def test_a_pipeline_that_is_hardly_filled_is_told() -> None:
    plan = towers(2, 4, 4, schedule="gpipe")
    timeline = simulate(compile_program(plan), StageCosts.uniform(plan, forward=1, backward=2))
    (said,) = (remark for remark in remarks(Prediction(plan=plan, timeline=timeline)) if "Filling" in remark)
    assert re.match(r"Filling and draining the pipeline takes \d+ % of .* 4 micro-batches\. ", said)
    assert "strategy.num_micro_batches" in said


def test_too_much_memory_comes_first(prediction: Prediction) -> None:
    needy = max(prediction.timeline.peak_bytes)
    tight = replace(prediction, memory_bytes=(needy - 1,) * prediction.plan.num_devices)
    assert re.match(r"Device \d needs \d B, 1 B more than it has\. .*strategy.micro_batch_size", remarks(tight)[0])


def test_a_simulation_that_is_far_off_is_told(prediction: Prediction) -> None:
    near, far = (compare_timelines(prediction.timeline, [slower(prediction.timeline, f)]) for f in (1.2, 0.5))
    assert remarks(prediction, near) == remarks(prediction)
    assert "takes 0.5 times the simulated one. strategy.costs=measured" in remarks(prediction, far)[-1]


def test_throughputs_that_are_far_apart_are_explained(prediction: Prediction) -> None:
    simulated = prediction.samples_per_second
    assert remarks(prediction, None, 1.1 * simulated) == remarks(prediction)
    assert re.search(
        r"samples/s, and .* are simulated: .*strategy.costs=measured", remarks(prediction, None, simulated / 5)[-1]
    )


@pytest.mark.parametrize(("low", "high"), [(0.31, 2.4), (-3, 5), (0.0, 0.0), (7, 7), (99.2, 99.7)])
def test_round_figures_enclose_the_values(low: float, high: float) -> None:
    figures = round_figures(low, high)
    assert figures[0] <= low <= high <= figures[-1]
    assert 2 <= len(figures) <= 7


def test_long_curves_are_thinned() -> None:
    assert curve_svg("loss", [(step, step % 7) for step in range(100_000)]).count(" L ") < 500
    assert curve_svg("loss", [(0, float("nan"))]) == ""
