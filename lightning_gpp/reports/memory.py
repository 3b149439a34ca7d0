"""The memory that devices need at their peak, against what they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.plan import Plan
from lightning_gpp.reports.units import percent, size
from lightning_gpp.simulation import Timeline

BAR = 40


@dataclass(slots=True)
class _Row:
    """Neighbouring devices with the same stages, whose peaks and limits look the same; the highest of these peaks."""

    devices: list[int]
    stages: tuple[int, ...]
    peak: float
    limit: float

    @property
    def shown(self) -> tuple[object, ...]:
        return self.stages, size(self.peak), size(self.limit), self.peak <= self.limit


def memory_text(plan: Plan, timeline: Timeline, memory_bytes: Sequence[float]) -> str:
    """One bar per device, full where the device is full; neighbours that are alike share a line.

    Args:
        plan: tells which stages a device holds.
        timeline: tells what a device needs at its peak.
        memory_bytes: of every device.
    """
    rows = list(_rows(plan, timeline, memory_bytes))
    labels = [_label(row.devices) for row in rows]
    figures = [f"{size(row.peak)} of {size(row.limit)}" for row in rows]
    indent, column = max(map(len, labels)), max(map(len, figures))
    return "\n".join(
        f"{label.rjust(indent)} |{_bar(row)}| {figure.ljust(column)}  {_verdict(row)}  {_names(plan, row)}"
        for label, figure, row in zip(labels, figures, rows, strict=True)
    )


def _rows(plan: Plan, timeline: Timeline, memory_bytes: Sequence[float]) -> Iterator[_Row]:
    current: _Row | None = None
    for device, (peak, limit) in enumerate(zip(timeline.peak_bytes, memory_bytes, strict=False)):
        row = _Row([device], plan.stages_on(device), peak, limit)
        if current is not None and current.shown == row.shown:
            current.devices.append(device)
            current.peak = max(current.peak, peak)
            continue
        if current is not None:
            yield current
        current = row
    if current is not None:
        yield current


def _label(devices: Sequence[int]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _bar(row: _Row) -> str:
    filled = min(BAR, round(BAR * row.peak / row.limit))
    return ("#" if row.peak <= row.limit else "!") * filled + "." * (BAR - filled)


def _verdict(row: _Row) -> str:
    return percent(row.peak / row.limit) if row.peak <= row.limit else f"{size(row.peak - row.limit)} TOO MUCH"


def _names(plan: Plan, row: _Row) -> str:
    return ", ".join(plan.stages[stage].name for stage in row.stages)
