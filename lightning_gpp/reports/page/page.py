"""The page: what the sections of the template show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Stage
from lightning_gpp.planning import Prediction
from lightning_gpp.reports import svg
from lightning_gpp.reports.graph import graph_picture, where
from lightning_gpp.reports.measured import Comparison, compare_timelines
from lightning_gpp.reports.page.chart import chart_data
from lightning_gpp.reports.page.curves import Curve, curve_svg
from lightning_gpp.reports.palette import DARK, LIGHT, stage_color
from lightning_gpp.reports.ranks import EACH_HEADER, HEADER, MeasuredRanks, batch_rows, rank_rows
from lightning_gpp.reports.remarks import remarks
from lightning_gpp.reports.schedule import device_figures
from lightning_gpp.reports.search import LEGEND
from lightning_gpp.reports.table import micro_batches
from lightning_gpp.reports.units import count, distance, duration, percent, rate, size
from lightning_gpp.simulation import Timeline
from lightning_gpp.wording import counted

FOLDER = "lightning_gpp.reports.page"
LATEST = 100
"""Mini-batches that are listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The figures of a run.

    Args:
        curves: logged values by their names.
        samples_per_second: throughput of all pipelines; one value per optimizer step.
        ranks: times of all ranks in the latest mini-batches.
    """

    curves: Mapping[str, Curve] = field(default_factory=dict)
    samples_per_second: Curve = ()
    ranks: MeasuredRanks | None = None


def report_html(
    prediction: Prediction,
    *,
    title: str,
    measured: Sequence[Timeline] = (),
    run: RunRecord | None = None,
    notes: Sequence[str] = (),
) -> str:
    """A page that needs no other file and no network.

    Args:
        prediction: the plan and its simulated step.
        title: name of the plan or run.
        measured: timelines of the run's mini-batches, if it was measured; the last one is drawn.
        run: losses and throughput, if there was a run.
        notes: sentences about the plan and the model.
    """
    comparison = _comparison(prediction, measured)
    return _template().render(
        title=title,
        colors={"light": LIGHT, "dark": DARK},
        css=_file("report.css"),
        script=_file("report.js"),
        style=svg.STYLE,
        definitions=svg.DEFINITIONS,
        tiles=_tiles(prediction, run),
        remarks=remarks(prediction, comparison, _throughput(run)),
        notes=notes,
        graph=graph_picture(prediction.plan),
        data=_embedded(chart_data(prediction, measured[-1] if measured else None)),
        has_measured=bool(measured),
        stages=[_stage_row(prediction, index) for index in range(len(prediction.plan.stages))],
        devices=_device_rows(prediction),
        compared=_compared_rows(comparison),
        curves=_curves(run),
        ranks=_ranks(run),
        search=prediction.search,
        unit="step" if prediction.period is None else "period",
        bound=duration(prediction.lower_bound) if prediction.lower_bound else "",
        gap=distance(prediction.gap),
        legend=LEGEND,
        alternatives=sorted(prediction.alternatives, key=lambda entry: entry.seconds),
        prediction=prediction,
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(duration=duration, size=size, percent=percent, color=stage_color, safe_svg=Markup)
    return environment.from_string(_file("report.html"))


def _file(name: str) -> str:
    return files(FOLDER).joinpath(name).read_text(encoding="utf-8")


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the element that contains it. Six digits show more than a screen can."""
    text = json.dumps(_rounded(data), separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _comparison(prediction: Prediction, measured: Sequence[Timeline]) -> Comparison | None:
    try:
        return compare_timelines(prediction.timeline, measured)
    except ScheduleError:  # nothing was measured
        return None


def _tiles(prediction: Prediction, run: RunRecord | None) -> list[tuple[str, str, str]]:
    """Figure, what it is, and a remark."""
    plan, peaks = prediction.plan, prediction.peak_bytes
    tiles = [
        (duration(prediction.seconds), "step" if prediction.period is None else "period", "simulated"),
        (rate(prediction.samples_per_second), "samples/s", "simulated"),
        (percent(prediction.idle), "idle", "mean of the devices"),
    ]
    if peaks:
        limit = f"of {size(min(prediction.memory_bytes))}" if prediction.memory_bytes else "of one device"
        tiles.append((size(max(peaks)), "peak memory", limit))
    pipelines = f" in {prediction.num_pipelines} pipelines" if prediction.num_pipelines > 1 else ""
    processes = f" of {plan.num_processes} processes" * (plan.num_processes > plan.num_devices)
    devices = f"{counted(plan.num_devices, 'device')}{processes}{pipelines}"
    tiles += [
        (str(len(plan.stages)), "stages", f"{plan.depth} deep, {devices}"),
        (str(plan.batch_size), "samples", f"in {micro_batches(plan, plan.batch_size)}, {plan.schedule}"),
    ]
    if (measured := _throughput(run)) is not None:
        tiles.insert(2, (rate(measured), "samples/s", "measured, median"))
    return tiles


def _throughput(run: RunRecord | None) -> float | None:
    """The median of the measured samples per second; None if there are none."""
    return median(value for _, value in run.samples_per_second) if run is not None and run.samples_per_second else None


def _stage_row(prediction: Prediction, index: int) -> dict[str, Any]:
    stage = prediction.plan.stages[index]
    figures, samples = stage.figures, stage.micro_batch_size
    backward = figures.input_seconds.at(samples) + figures.weight_seconds.at(samples)
    return {
        "index": index,
        "name": stage.name,
        "modules": _modules(stage),
        "devices": where(stage),
        "samples": samples,
        "parameters": count(figures.num_parameters),
        "flops": count(figures.flops.at(samples)),
        "activations": size((figures.activation_bytes + figures.offloaded_bytes).at(samples)),
        "seconds": f"{duration(figures.forward_seconds.at(samples))} + {duration(backward)}" if backward else "-",
        "flight": prediction.in_flight[index],
    }


def _modules(stage: Stage) -> list[str]:
    return [module or "(whole model)" for module in stage.modules]


def _device_rows(prediction: Prediction) -> list[dict[str, Any]]:
    limits = prediction.memory_bytes
    return [
        {
            "device": entry.device,
            "stages": entry.stages,
            "idle": entry.bubble_fraction,
            "peak": entry.peak_bytes,
            "limit": limits[entry.device] if entry.device < len(limits) else 0.0,
            "sent": str(entry.sent),
            "received": str(entry.received),
        }
        for entry in (device_figures(prediction) if prediction.peak_bytes else ())
    ]


def _compared_rows(comparison: Comparison | None) -> list[dict[str, Any]]:
    if comparison is None:
        return []
    return [
        {"stage": stage, "name": comparison.stages[stage], "action": kind.name.lower(), "pair": pair}
        for (stage, kind), pair in comparison.actions.items()
    ]


def _ranks(run: RunRecord | None) -> dict[str, Any]:
    """The tables of the ranks in the run and in its latest mini-batches; empty if nothing was measured."""
    if run is None or run.ranks is None or not run.ranks.num_batches:
        return {}
    return {
        "number": run.ranks.num_batches,
        "tables": ((HEADER, rank_rows(run.ranks)), (EACH_HEADER, batch_rows(run.ranks, LATEST))),
    }


def _curves(run: RunRecord | None) -> list[tuple[str, str, Markup]]:
    """Name, last value and picture of every curve."""
    if run is None:
        return []
    curves = {**run.curves, **({"samples/s": run.samples_per_second} if run.samples_per_second else {})}
    drawn = [(name, curve, curve_svg(name, curve)) for name, curve in curves.items()]
    return [(name, f"{curve[-1][1]:.4g}", Markup(picture)) for name, curve, picture in drawn if picture]
