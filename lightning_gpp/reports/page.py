"""The report of a plan or a run: one HTML file without any other, with pictures and figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.gantt import timeline_svg
from lightning_gpp.reports.graph import graph_svg
from lightning_gpp.reports.measured import comparison_text
from lightning_gpp.reports.palette import DARK, LIGHT
from lightning_gpp.reports.text import figures_text
from lightning_gpp.simulation import Timeline


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
        _section("Figures", _text(figures_text(prediction))),
        *([_section("Notes", *map(_text, notes))] if notes else ()),
    ]
    template = Template(files("lightning_gpp.reports").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        sections="\n".join(sections),
    )


def _section(heading: str, *content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{''.join(content)}\n</section>"


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())
