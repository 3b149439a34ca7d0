"""Peak memory of an order, and the memory limit of each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_gpp.schedules.actions import Kind
from lightning_gpp.schedules.list_scheduling import DeviceOrders
from lightning_gpp.schedules.one_f_one_b import warm_up
from lightning_gpp.schedules.work import Work, peak, turns


def peaks_of(work: Work, rows: DeviceOrders) -> list[float]:
    """Peak memory of every device if it follows its order."""
    return [peak(work.takes[device, action] for action in row) for device, row in enumerate(rows)]


def needs_of(work: Work) -> dict[tuple[int, int], float]:
    """Bytes that the replica of a stage on a device holds under 1F1B, by stage and device."""
    flying = warm_up(work.plan, work.batch_size)
    kept: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (device, action), taken in work.takes.items():
        if action.kind is Kind.FORWARD:
            kept[action.stage, device].append(taken)
    counts = [-(-flying[index] // turns(stage)) for index, stage in enumerate(work.plan.stages)]
    return {place: sum(sorted(sizes)[-counts[place[0]] :]) for place, sizes in kept.items()}


def limits_of(work: Work, share: float = 1, needs: Mapping[tuple[int, int], float] | None = None) -> tuple[float, ...]:
    """Memory limit of every device; if the plan has none, `share` times the peak of the neediest device under 1F1B.

    `needs`: the result of `needs_of`, if known already.
    """
    if work.limits:
        return work.limits
    totals: dict[int, float] = defaultdict(float)
    for (_, device), need in (needs or needs_of(work)).items():
        totals[device] += need
    return (share * max(totals.values()),) * work.plan.num_devices


def fits(work: Work, peaks: Sequence[float]) -> bool:
    """True if the peaks are within the memory limits, if these are known."""
    return not work.limits or all(peak <= limit for peak, limit in zip(peaks, work.limits, strict=True))


def compaction_limits(work: Work, peaks: Sequence[float]) -> list[float]:
    """Memory limit of every device for the compaction of an order with these peaks.

    It is the highest peak or, if lower, the plan's limit, but at least the device's own peak.
    """
    limits = work.limits or (max(peaks),) * len(peaks)
    return [max(peak, min(limit, max(peaks))) for peak, limit in zip(peaks, limits, strict=True)]
