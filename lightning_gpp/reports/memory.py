"""Peak memory of every device beside its memory limit, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.units import percent, size

BAR, NARROWEST = 40, 10
"""Characters of a bar, and of one in a narrow text."""


@dataclass(slots=True)
class _Bar:
    """Neighbouring devices with the same stages, whose peaks and limits look the same in text, and the highest peak."""

    devices: list[int]
    stages: tuple[int, ...]
    peak: float
    limit: float

    @property
    def shown(self) -> tuple[object, ...]:
        return self.stages, size(self.peak), size(self.limit), self.peak <= self.limit


def memory_text(prediction: Prediction, width: int | None = None) -> str:
    """One bar per device, full at the memory limit; neighbours that look the same share a line.

    Args:
        prediction: the plan and its simulated step.
        width: characters of a line; None: any number.
    """
    plan, rows = prediction.plan, list(_rows(prediction))
    labels = [_label(row.devices) for row in rows]
    figures = [f"{size(row.peak)} of {size(row.limit)}" for row in rows]
    indent, column = max(map(len, labels), default=0), max(map(len, figures), default=0)
    ends = [f"{figure.ljust(column)}  {_verdict(row)}" for figure, row in zip(figures, rows, strict=True)]
    names = [_names(plan, row) for row in rows]
    longest = max((len(end) + len(name) for end, name in zip(ends, names, strict=True)), default=0)
    bar = BAR if width is None else max(NARROWEST, min(BAR, width - indent - longest - 6))
    lines = (
        f"{label.rjust(indent)} |{_bar(row, bar)}| {end}  {name}"
        for label, row, end, name in zip(labels, rows, ends, names, strict=True)
    )
    return "\n".join(line if width is None else _clipped(line, width) for line in lines)


def _clipped(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _rows(prediction: Prediction) -> list[_Bar]:
    rows: list[_Bar] = []
    for device, (peak, limit) in enumerate(zip(prediction.peak_bytes, prediction.memory_bytes, strict=False)):
        row = _Bar([device], prediction.plan.stages_on(device), peak, limit)
        if rows and rows[-1].shown == row.shown:
            rows[-1].devices.append(device)
            rows[-1].peak = max(rows[-1].peak, peak)
        else:
            rows.append(row)
    return rows


def _label(devices: Sequence[int]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _bar(row: _Bar, length: int) -> str:
    filled = min(length, round(length * row.peak / row.limit))
    return ("#" if row.peak <= row.limit else "!") * filled + "." * (length - filled)


def _verdict(row: _Bar) -> str:
    return percent(row.peak / row.limit) if row.peak <= row.limit else f"{size(row.peak - row.limit)} TOO MUCH"


def _names(plan: Plan, row: _Bar) -> str:
    return ", ".join(plan.stages[stage].name for stage in row.stages)
