"""The report of a plan or run: as text, for the terminal and the run folder, and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.graph import graph_svg, graph_text
from lightning_gpp.reports.tables import comparison_text, devices_text, plan_table
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.timeline import WIDTH, timeline_svg, timeline_text
from lightning_gpp.reports.units import distance, duration, percent, rate, size
from lightning_gpp.simulation import Period, Timeline


def prediction_text(prediction: Prediction, width: int | None = None) -> str:
    """Plan, stage graph, timeline, devices, search and period, separated by empty lines.

    Args:
        prediction: the plan and its simulated step.
        width: characters of a line; None: as many as the tables need.
    """
    drawn = graph_text(prediction.plan, width), timeline_text(prediction.drawn, width or WIDTH)
    table, *others = _figures(prediction, width)
    return "\n\n".join(filter(None, [table, *drawn, *others]))


def _figures(prediction: Prediction, width: int | None) -> list[str]:
    period = prediction.period
    return [
        plan_table(prediction.plan, width=width, flights=prediction.in_flight),
        devices_text(prediction, width),
        search_text(prediction, width),
        "" if period is None else period_text(prediction.plan, period),
    ]


def search_text(prediction: Prediction, width: int | None = None) -> str:
    """Step time or period, throughput, effort of the search and lower bound; empty without a search.

    Args:
        prediction: the plan and its search.
        width: characters of a line, longer ones are broken; None: any number.
    """
    search = prediction.search
    if search is None:
        return ""
    kind = "step" if prediction.period is None else "period"
    lines = (
        f"{kind}: {duration(prediction.seconds)} simulated, {rate(prediction.samples_per_second)} samples/s, "
        f"idle {percent(prediction.idle)}",
        f"partitioner {prediction.plan.notes.get('partitioner')}: {search.states} states in {duration(search.seconds)}",
        _bound(prediction, kind),
        *search.notes,
    )
    text = "\n".join(filter(None, lines))
    return text if width is None else "\n".join(wrapped(line, width) for line in text.splitlines())


def _bound(prediction: Prediction, kind: str) -> str:
    if prediction.gap is None:
        return "lower bound: none is known for this plan"
    bound, gap = duration(prediction.lower_bound), distance(prediction.gap)
    return (
        f"lower bound, with all devices busy all the time: {bound}; this {kind} is at most {gap} longer than the best "
        "possible one"
    )


def period_text(plan: Plan, period: Period) -> str:
    """Seconds per mini-batch with and without a flush, and a line for every stage.

    Args:
        plan: the plan of the pipeline.
        period: its simulated period.
    """
    lines = [
        f"Without a flush: {duration(period.seconds)} per mini-batch, {duration(period.fill_and_drain)} to fill "
        f"and drain; with a flush after each: {duration(period.flushed)}.",
    ]
    lines += [tied_text(plan, period, group) for group in period.tied]
    if period.delays:
        lines.append("Delays, in optimizer steps between a forward and its backward:")
    for index, delay in period.delays.items():
        stage, kept = plan.stages[index], period.copies[index]
        memory = size(kept * stage.figures.parameter_bytes)
        copied = f"{kept} more {'copy' if kept == 1 else 'copies'} of its weights ({memory})" if kept else "no copy"
        lines.append(f"  {index} {stage.name}: {delay}, {copied}")
    return "\n".join(lines)


def tied_text(plan: Plan, period: Period, group: Sequence[int]) -> str:
    """A sentence on stages that share weights, with a remedy."""
    names = ", ".join(repr(plan.stages[stage].name) for stage in group)
    return (
        f"The stages {names} share weights, so their devices wait for each other before every update; without that a "
        f"mini-batch would take {duration(period.untied)}. On one device they do not wait: give them the same in "
        "strategy.stages."
    )


def report_html(
    prediction: Prediction, *, title: str, measured: Sequence[Timeline] = (), notes: Sequence[str] = ()
) -> str:
    """A page that needs no other file, no script and no network.

    Args:
        prediction: the plan and its simulated step.
        title: name of the plan or run.
        measured: timelines of the run's mini-batches, if it was measured; the last one is drawn.
        notes: texts about the plan, the model and the run.
    """
    timelines = {"simulated": prediction.timeline, "measured": measured[-1]} if measured else prediction.drawn
    compared = [comparison_text(prediction.timeline, measured)] if measured else []
    sections = [
        _section("Stages", graph_svg(prediction.plan)),
        _section("Timeline", timeline_svg(timelines)),
        *(_section("Simulated and measured", _text(text)) for text in compared),
        _section("Figures", *map(_text, filter(None, _figures(prediction, None)))),
        *([_section("Notes", *map(_text, notes))] if notes else ()),
    ]
    template = Template(files("lightning_gpp.reports").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        sections="\n".join(sections),
    )


def _section(heading: str, *content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{''.join(content)}\n</section>"


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
