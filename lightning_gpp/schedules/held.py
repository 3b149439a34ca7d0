"""What orders of split backwards keep in memory, and what room that leaves."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.split_work import Rows, SplitWork


def peaks_of(work: SplitWork, rows: Rows) -> list[float]:
    """The most bytes that every device keeps if it follows its order."""
    peaks = []
    for device, row in enumerate(rows):
        held = peak = 0.0
        for action in row:
            forward = device, action._replace(kind=Kind.FORWARD)
            kept, pending = work.kept[forward], work.pending[forward]
            held += {Kind.FORWARD: kept, Kind.INPUT: pending - kept, Kind.WEIGHT: -pending}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def fits(plan: Plan, peaks: Sequence[float]) -> bool:
    """Whether every device has the memory, as far as that is known."""
    return not plan.memory_bytes or all(peak <= limit for peak, limit in zip(peaks, plan.memory_bytes, strict=True))


def rooms(plan: Plan, peaks: Sequence[float]) -> list[float]:
    """Bytes for every device: what the one that needs most takes, but not more than there is, if its own need fits."""
    limits = plan.memory_bytes or (max(peaks),) * len(peaks)
    return [max(peak, min(limit, max(peaks))) for peak, limit in zip(peaks, limits, strict=True)]
