"""The search behind a plan: its figures, the lower bound, and the plans that lost."""

from __future__ import annotations

from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.units import distance, duration, percent, rate

LEGEND: Final = (
    "u: units of a stage, x: its devices, *: processes of each, r: recomputed, r3: 3 blocks of it, o: offloaded, "
    "+: slack, b: micro-batch size"
)
"""The letters in the descriptions of runners-up."""


def search_text(prediction: Prediction, width: int | None = None) -> str:
    """Step time or period, throughput, effort of the search, lower bound and runners-up; empty without a search.

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
        f"partitioner {search.partitioner}: objective {search.objective:.4g} ({search.objective_name}), "
        f"{search.states} states in {duration(search.seconds)}",
        _bound(prediction, kind),
        *search.notes,
        _alternatives(prediction),
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


def _alternatives(prediction: Prediction) -> str:
    """The plans that were not chosen, best first, with the reasons; empty if the partitioner names none."""
    if not prediction.alternatives:
        return ""
    lines = [
        f"  {number}. {duration(entry.seconds)}, {entry.draft}{f': {entry.reason}' if entry.reason else ''}"
        for number, entry in enumerate(sorted(prediction.alternatives, key=lambda entry: entry.seconds), start=1)
    ]
    return "\n".join([f"runners-up, as estimated ({LEGEND})", *lines])
