"""The parts of a plan that cost most: idle time with its causes, memory near its limit, and what can be changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.lanes import computes
from lightning_gpp.reports.measured import Comparison
from lightning_gpp.reports.period import tied_text
from lightning_gpp.reports.units import duration, percent, rate, size
from lightning_gpp.simulation import Timeline

MUCH_IDLE: Final = 0.15
"""Share of the step from which idle time is worth a remark."""

AHEAD: Final = 0.1
"""Share of the step by which the busiest device computes longer than any other, from which it is worth a remark."""

NEARLY_FULL: Final = 0.9
"""Share of the memory limit from which memory is worth a remark."""

OFF: Final = 1.5
"""Ratio of measured and simulated seconds, or its inverse, from which it is worth a remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """The idle time of a device, in shares of the step.

    Args:
        before: before its first action.
        after: after its last action.
        waiting: between actions, by the index of the stage whose message it waits for; None for its own device's.
    """

    before: float
    after: float
    waiting: dict[int | None, float]

    @property
    def total(self) -> float:
        return self.before + self.after + sum(self.waiting.values())


def idle_times(timeline: Timeline) -> list[IdleTime]:
    """The idle time of every device; a wait belongs to the message that arrived last."""
    return [_idle_time(timeline, device) for device in range(len(timeline.devices))]


def _idle_time(timeline: Timeline, device: int) -> IdleTime:
    spans = [span for span in timeline.devices[device] if computes(span.action)]
    whole = timeline.makespan
    if not spans or not whole:
        return IdleTime(before=1.0, after=0.0, waiting={})
    arrivals = defaultdict(list)
    for transfer in timeline.transfers:
        if transfer.dst == device:
            arrivals[transfer.consumer].append((transfer.stop, transfer.producer.stage))
    waiting: dict[int | None, float] = defaultdict(float)
    for before, span in zip(spans, spans[1:], strict=False):
        if span.start > before.stop:
            last = max(arrivals[span.action], default=(0.0, None))
            waiting[last[1]] += (span.start - before.stop) / whole
    first, last_stop = spans[0].start - timeline.start, spans[-1].stop - timeline.start
    return IdleTime(before=first / whole, after=1 - last_stop / whole, waiting=dict(waiting))


def remarks(
    prediction: Prediction, comparison: Comparison | None = None, samples_per_second: float | None = None
) -> list[str]:
    """Sentences for the user, the most important first.

    Args:
        prediction: the plan and its simulated step.
        comparison: simulated and measured times, if the run was measured.
        samples_per_second: the measured throughput, if there was a run.
    """
    return [
        *_memory(prediction),
        *(_idle(prediction) if prediction.period is None else ()),
        *_tied(prediction),
        *_busiest(prediction),
        *_bound(prediction),
        *_measured(comparison),
        *(_throughput(prediction, samples_per_second) if comparison is None else ()),
    ]


def _memory(prediction: Prediction) -> Iterator[str]:
    """A remark on the device that is fullest."""
    pairs = list(zip(prediction.peak_bytes, prediction.memory_bytes, strict=False))
    device = max(range(len(pairs)), key=lambda device: pairs[device][0] / pairs[device][1], default=0)
    peak, limit = pairs[device] if pairs else (0.0, 0.0)
    if peak > limit:
        yield (
            f"Device {device} needs {size(peak)}, {size(peak - limit)} more than it has. Smaller micro-batches "
            "(strategy.micro_batch_size), recomputation (strategy.recompute) or strategy.sharding=zero1 need less."
        )
    elif peak > NEARLY_FULL * limit:
        yield (
            f"Device {device} fills {percent(peak / limit)} of its memory: {size(peak)} of {size(limit)}. What the "
            "simulation does not count, such as buffers of libraries, may be too much."
        )


def _idle(prediction: Prediction) -> Iterator[str]:
    times = idle_times(prediction.timeline)
    device = max(range(len(times)), key=lambda device: times[device].total, default=0)
    if times and times[device].total >= MUCH_IDLE:
        yield f"Device {device} idles {percent(times[device].total)}: {_causes(prediction, times[device])}."
    ends = sum(entry.before + entry.after for entry in times) / max(1, len(times))
    if ends >= MUCH_IDLE:
        plan = prediction.plan
        number = max(len(plan.intervals(stage)) for stage in range(len(plan.stages)))
        yield (
            f"Filling and draining the pipeline takes {percent(ends)} of the devices' time, with "
            f"{number} micro-batches. More micro-batches (strategy.num_micro_batches), a larger "
            "mini-batch, or a schedule that fills the gaps shorten it: gpp-plan compare schedules=all."
        )


def _causes(prediction: Prediction, idle: IdleTime) -> str:
    stages = prediction.plan.stages
    parts = [(idle.before, "before its first action"), (idle.after, "after its last action")]
    for stage, share in idle.waiting.items():
        parts.append((share, "between its own actions" if stage is None else f"waiting for {stages[stage].name}"))
    shown = sorted((part for part in parts if part[0] >= 0.005), reverse=True)
    return ", ".join(f"{percent(share)} {cause}" for share, cause in shown)


def _tied(prediction: Prediction) -> Iterator[str]:
    period = prediction.period
    if period is not None and period.seconds > period.untied:
        yield from (tied_text(prediction.plan, period, group) for group in period.tied)


def _busiest(prediction: Prediction) -> Iterator[str]:
    idle, plan = prediction.idle_fractions, prediction.plan
    first, *others = sorted(range(len(idle)), key=idle.__getitem__)
    if not others or idle[others[0]] - idle[first] < AHEAD:
        return
    names = " and ".join(plan.stages[stage].name for stage in plan.stages_on(first))
    yield (
        f"Device {first} computes {percent(1 - idle[first])} of the {_unit(prediction)}, any other at most "
        f"{percent(1 - idle[others[0]])}: {names} decides its time. Fewer modules there (strategy.stages), or "
        "replicas of it, as far as strategy.max_replicas allows them, help."
    )


def _unit(prediction: Prediction) -> str:
    return "step" if prediction.period is None else "period"


def _bound(prediction: Prediction) -> Iterator[str]:
    if prediction.gap is not None and prediction.search is not None:
        yield (
            f"With all devices busy all the time it would take {duration(prediction.lower_bound)}: at most "
            f"{percent(1 - prediction.lower_bound / prediction.seconds)} of this {_unit(prediction)} can be gained."
        )


def _measured(comparison: Comparison | None) -> Iterator[str]:
    if comparison is None or not comparison.step.ratio:
        return
    ratio = comparison.step.ratio
    if max(ratio, 1 / ratio) >= OFF:
        yield (
            f"The measured step takes {ratio:.2g} times the simulated one. strategy.costs=measured times the model's "
            "blocks on this machine before it plans."
        )


def _throughput(prediction: Prediction, measured: float | None) -> Iterator[str]:
    simulated = prediction.samples_per_second
    if measured and simulated and max(measured / simulated, simulated / measured) >= OFF:
        yield (
            f"The run trains {rate(measured)} samples/s, and {rate(simulated)} are simulated: its seconds are computed "
            "from FLOPs and bytes, unless they are measured. strategy.costs=measured times the model's blocks on this "
            "machine before it plans; strategy.trace=true compares every action."
        )
