"""What orders keep in memory, and what room devices have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.held_bytes import peak
from lightning_gpp.schedules.one_f_one_b import warm_up
from lightning_gpp.schedules.task_graph import Rows
from lightning_gpp.schedules.work import Work, turns


def peaks_of(work: Work, rows: Rows) -> list[float]:
    """Peak memory of every device if it follows its order."""
    return [peak(work.takes[device, action] for action in row) for device, row in enumerate(rows)]


def needs_of(work: Work) -> dict[tuple[int, int], float]:
    """For every stage and device the bytes that the replica keeps under 1F1B."""
    flying = warm_up(work.plan, work.batch_size)
    kept: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (device, action), taken in work.takes.items():
        if action.kind is Kind.FORWARD:
            kept[action.stage, device].append(taken)
    counts = [-(-flying[index] // turns(stage)) for index, stage in enumerate(work.plan.stages)]
    return {place: sum(sorted(sizes)[-counts[place[0]] :]) for place, sizes in kept.items()}


def limits_of(work: Work, share: float = 1, needs: Mapping[tuple[int, int], float] | None = None) -> tuple[float, ...]:
    """Bytes for every device; where the plan knows none, `share` times what the neediest one keeps under 1F1B.

    `needs` are those of `needs_of`, where they are known already.
    """
    if work.limits:
        return work.limits
    totals: dict[int, float] = defaultdict(float)
    for (_, device), need in (needs or needs_of(work)).items():
        totals[device] += need
    return (share * max(totals.values()),) * work.plan.num_devices


def fits(work: Work, peaks: Sequence[float]) -> bool:
    """Whether every device has the memory, as far as that is known."""
    return not work.limits or all(peak <= limit for peak, limit in zip(peaks, work.limits, strict=True))


def rooms(work: Work, peaks: Sequence[float]) -> list[float]:
    """Bytes for every device: what the one that needs most takes, but not more than there is, if its own need fits."""
    limits = work.limits or (max(peaks),) * len(peaks)
    return [max(peak, min(limit, max(peaks))) for peak, limit in zip(peaks, limits, strict=True)]
