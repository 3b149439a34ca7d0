"""Tables: of a plan, of its devices, of several predictions side by side, and of simulated and measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Final

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import Plan, Stage
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.terminal import markdown, wrapped
from lightning_gpp.reports.timeline import computes
from lightning_gpp.reports.units import count, distance, duration, percent, rate, size
from lightning_gpp.schedules import Kind, in_flight
from lightning_gpp.simulation import Timeline
from lightning_gpp.wording import counted

PLAN: Final = ("stage", "modules", "devices", "samples", "parameters", "FLOPs", "activations", "in flight")
"""Samples, and FLOPs of a forward, are those of one micro-batch. Activations are what a stage keeps of one for its
backward; where it is "recomputed", or blocks of it are, it keeps their inputs; where it is "offloaded", all but its
inputs lie in host memory in between.
"""


def plan_table(plan: Plan, width: int | None = None, flights: Mapping[int, int] | None = None) -> str:
    """One row per stage, and a line that sums up the plan.

    Args:
        plan: the plan.
        width: characters of a line.
        flights: micro-batches in flight on every stage; by default those of a mini-batch with a flush.

    Raises:
        ScheduleError: the plan's schedule is unknown or cannot run.
    """
    flights = flights or in_flight(plan)
    table = markdown(PLAN, [_row(plan, stage, flights[stage]) for stage in range(len(plan.stages))], width)
    total = summary(plan)
    return f"{table}\n\n{total if width is None else wrapped(total, width)}"


def summary(plan: Plan) -> str:
    """Numbers of stages and devices, depth, schedule, and the micro-batches of the mini-batch."""
    stages, devices = counted(len(plan.stages), "stage"), counted(plan.num_devices, "device")
    used = f"{plan.num_devices - len(plan.unused)} of " * bool(plan.unused)
    processes = f" ({plan.num_processes} processes)" * (plan.num_processes > plan.num_devices)
    return (
        f"{stages} on {used}{devices}{processes}, depth {plan.depth}, schedule {plan.schedule}, "
        f"mini-batch of {plan.batch_size} samples in {_micro_batches(plan)}"
    )


def _micro_batches(plan: Plan) -> str:
    """The number of micro-batches of a mini-batch; several numbers if stages have micro-batches of different sizes."""
    counts = sorted({len(plan.intervals(stage)) for stage in range(len(plan.stages))})
    return "1 micro-batch" if counts == [1] else f"{'/'.join(map(str, counts))} micro-batches"


def _row(plan: Plan, index: int, flight: int) -> list[str]:
    stage = plan.stages[index]
    figures, samples, text = stage.figures, stage.micro_batch_size, measures(stage)
    return [
        f"{index} {stage.name}",
        _extent(stage.modules),
        ",".join(map(str, stage.devices)),
        str(samples),
        count(figures.num_parameters),
        count(figures.flops.at(samples)),
        size((figures.activation_bytes + figures.offloaded_bytes).at(samples)) + (f" ({text})" if text else ""),
        str(flight),
    ]


def _extent(modules: Sequence[str]) -> str:
    shown = [module or "(whole model)" for module in modules]
    return ", ".join(shown) if len(shown) <= 3 else f"{shown[0]}, ..., {shown[-1]} ({len(shown)} modules)"


def measures(stage: Stage) -> str:
    """The blocks that a stage recomputes, or that it does as a whole, and whether it offloads, in words."""
    number = len(stage.recomputed_blocks)
    again = f"{number} block{'s' * (number > 1)} recomputed" if number else "recomputed" * stage.reruns
    return ", ".join(filter(None, [again, "offloaded" * stage.offload]))


DEVICES: Final = ("devices", "holds", "idle", "peak memory", "sent", "received")
"""Idle is the fraction of the step, or without a flush of the period."""


def devices_text(prediction: Prediction, width: int | None = None) -> str:
    """A table with one row per device; neighbours that look the same share a row."""
    plan = prediction.plan
    sent, received = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for transfer in prediction.timeline.transfers:
        sent[transfer.src].append(transfer.num_bytes)
        received[transfer.dst].append(transfer.num_bytes)
    unknown = (0.0,) * plan.num_devices
    peaks, limits = prediction.peak_bytes or unknown, prediction.memory_bytes or unknown
    rows = [
        [
            str(device),
            _stages(plan.stages_on(device)),
            percent(prediction.idle_fractions[device]),
            _memory(peaks[device], limits[device]),
            _traffic(sent[device]),
            _traffic(received[device]),
        ]
        for device in range(plan.num_devices)
    ]
    return markdown(DEVICES, [_joined(list(group)) for _, group in groupby(rows, key=lambda row: row[1:])], width)


def _traffic(messages: Sequence[float]) -> str:
    """The number of messages, and their bytes."""
    return f"{len(messages)} ({size(sum(messages))})" if messages else "-"


def _memory(peak: float, limit: float) -> str:
    if not limit:
        return size(peak)
    share = percent(peak / limit) if peak <= limit else f"{size(peak - limit)} TOO MUCH"
    return f"{size(peak)} of {size(limit)}, {share}"


def _stages(stages: Sequence[int]) -> str:
    noun = "stage" if len(stages) == 1 else "stages"
    return f"{noun} {', '.join(map(str, stages))}" if stages else "nothing"


def _joined(rows: Sequence[list[str]]) -> list[str]:
    first, last = rows[0], rows[-1]
    return first if len(rows) == 1 else [f"{first[0]}-{last[0]}", *first[1:]]


Compared = Prediction | str
"""A prediction, or the reason why there is none."""

COMPARISON: Final = (
    *("pipelines", "stages", "micro-batches", "step", "samples/s", "of the best", "gap", "idle"),
    *("peak memory", "search"),
)
"""Stages and micro-batches are those of one pipeline; peak memory is that of the device with the most, "search"
the duration of the search. "of the best" is the throughput relative to the highest among those that fit the
memory, "gap" the distance of the step time from a lower bound. Without a flush the period replaces the step.
"""


def comparison_table(what: str, outcomes: Sequence[tuple[str, Compared]], width: int | None = None) -> str:
    """One row per outcome; below, the reasons of those that have no plan, and notes on others.

    Args:
        what: header of the first column.
        outcomes: names and predictions.
        width: characters of a line.
    """
    predictions = [outcome for _, outcome in outcomes if isinstance(outcome, Prediction)]
    without_flush = any(entry.period is not None for entry in predictions)
    header = [what, *("period" if name == "step" and without_flush else name for name in COMPARISON)]
    best = max((entry.samples_per_second for entry in predictions if not entry.excess_bytes), default=0.0)
    rows = [[name, *_prediction_cells(outcome, best)] for name, outcome in outcomes]
    remarks = [(name, outcome if isinstance(outcome, str) else outcome.note) for name, outcome in outcomes]
    below = [f"{name}: {remark}" for name, remark in remarks if remark]
    lines = below if width is None else [wrapped(line, width) for line in below]
    return "\n".join([markdown(header, rows, width), *([""] if lines else []), *lines])


def _prediction_cells(outcome: Compared, best: float) -> list[str]:
    if isinstance(outcome, str):
        return ["-"] * len(COMPARISON)
    plan, search, excess = outcome.plan, outcome.search, outcome.excess_bytes
    return [
        str(outcome.num_pipelines),
        str(len(plan.stages)),
        _range(len(plan.intervals(stage)) for stage in range(len(plan.stages))),
        duration(outcome.seconds),
        rate(outcome.samples_per_second),
        f"{outcome.samples_per_second / best:.3f}" if best else "-",
        distance(outcome.gap),
        percent(outcome.idle),
        size(max(outcome.peak_bytes)) + (f", {size(excess)} TOO MUCH" if excess else ""),
        duration(search.seconds) if search else "-",
    ]


def _range(numbers: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(numbers))))


TIMES: Final = ("stage", "action", "simulated", "measured", "ratio")


def comparison_text(simulated: Timeline, measured: Sequence[Timeline]) -> str:
    """A table of mean seconds: one row per stage and kind of action, then the step and its idle part.

    Collectives and host copies are left out, and so the step ends with the last computing action.

    Args:
        simulated: timeline of one mini-batch.
        measured: one timeline per mini-batch and pipeline of the same plan, with the same number of samples.

    Raises:
        ScheduleError: nothing was measured, or the timelines have other stages.
    """
    _check(simulated, measured)
    expected, taken = _computing(simulated), [_computing(timeline) for timeline in measured]
    both = _action_seconds([expected]), _action_seconds(taken)
    keys = sorted({**both[0], **both[1]}, key=lambda key: (key[0], list(Kind).index(key[1])))
    rows = [
        [f"{stage} {simulated.stages[stage]}", kind.name.lower(), *_time_cells(*(m.get((stage, kind)) for m in both))]
        for stage, kind in keys
    ]
    rows.append(["all", "step", *_time_cells(expected.makespan, fmean(timeline.makespan for timeline in taken))])
    idle = expected.bubble_fraction, fmean(timeline.bubble_fraction for timeline in taken)
    rows.append(["all", "idle", *map(percent, idle), "-"])
    return markdown(TIMES, rows)


def _check(simulated: Timeline, measured: Sequence[Timeline]) -> None:
    for timeline in measured:
        if timeline.stages != simulated.stages:
            raise ScheduleError(
                f"A timeline of the stages {list(timeline.stages)} cannot be compared with a simulation of the stages "
                f"{list(simulated.stages)}. Take both from one plan."
            )
    if not measured:
        raise ScheduleError(
            "No mini-batch of the plan's size was measured. Train on at least one with strategy.trace=true."
        )


def _computing(timeline: Timeline) -> Timeline:
    """The timeline without collectives and host copies."""
    kept = (tuple(span for span in device if computes(span.action)) for device in timeline.devices)
    return Timeline(stages=timeline.stages, devices=tuple(kept))


def _action_seconds(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], float]:
    """Mean seconds of an action by stage and kind, over all micro-batches and replicas."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in (span for timeline in timelines for device in timeline.devices for span in device):
        seconds[span.action.stage, span.action.kind].append(span.stop - span.start)
    return {key: fmean(values) for key, values in seconds.items()}


def _time_cells(simulated: float | None, measured: float | None) -> list[str]:
    times = ["-" if value is None else duration(value) for value in (simulated, measured)]
    return [*times, f"{measured / simulated:.2f}" if simulated and measured is not None else "-"]
