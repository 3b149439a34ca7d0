"""Figures of every device in one mini-batch: idle time, memory, micro-batches in flight, messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.terminal import markdown
from lightning_gpp.reports.units import percent, size
from lightning_gpp.schedules import Action, Kind, Message, compile_program
from lightning_gpp.schedules.actions import RELEASES

HEADER: Final = ("devices", "holds", "idle", "peak memory", "in flight", "sent", "received")
"""Idle is the fraction of the step, or without a flush of the period; in flight are micro-batches of all stages."""


def devices_text(prediction: Prediction, width: int | None = None) -> str:
    """A table with one row per device; neighbours that look the same share a row."""
    plan = prediction.plan
    program = compile_program(plan, training=_trains(prediction), copies=prediction.num_pipelines)
    sent, received = defaultdict[int, list[Message]](list), defaultdict[int, list[Message]](list)
    for message in program.messages:
        if message.src != message.dst:
            sent[message.src].append(message)
            received[message.dst].append(message)
    unknown = (0.0,) * plan.num_devices
    peaks, limits = prediction.peak_bytes or unknown, prediction.memory_bytes or unknown
    flights = devices_in_flight(prediction)
    rows = [
        [
            str(device),
            _stages(plan.stages_on(device)),
            percent(prediction.idle_fractions[device]),
            _memory(peaks[device], limits[device]),
            str(flights[device]),
            _traffic(plan, sent[device]),
            _traffic(plan, received[device]),
        ]
        for device in range(plan.num_devices)
    ]
    return markdown(HEADER, [_joined(list(group)) for _, group in groupby(rows, key=lambda row: row[1:])], width)


def devices_in_flight(prediction: Prediction) -> list[int]:
    """The most micro-batches in flight at a time on every device, over all its stages."""
    ends = RELEASES if _trains(prediction) else (Kind.FORWARD,)
    return [_in_flight(ends, (span.action for span in spans)) for spans in prediction.drawn.devices]


def _trains(prediction: Prediction) -> bool:
    return any(span.action.kind in RELEASES for spans in prediction.drawn.devices for span in spans)


def _in_flight(ends: Sequence[Kind], actions: Iterable[Action]) -> int:
    now = most = 0
    for action in actions:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.kind in ends
    return most


def _traffic(plan: Plan, messages: Sequence[Message]) -> str:
    num_bytes = sum(plan.edges[message.edge].bytes.at(message.stop - message.start) for message in messages)
    return f"{len(messages)} ({size(num_bytes)})" if messages else "-"


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
