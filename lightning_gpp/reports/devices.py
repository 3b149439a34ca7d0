"""Figures of every device in one mini-batch: idle time, memory, micro-batches in flight, messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.tables import markdown
from lightning_gpp.reports.units import percent, size
from lightning_gpp.schedules import Action, Kind, Program, compile_program
from lightning_gpp.schedules.actions import RELEASES


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one mini-batch between a device and others, and their bytes."""

    messages: int = 0
    num_bytes: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.num_bytes + other.num_bytes)

    def __str__(self) -> str:
        return f"{self.messages} ({size(self.num_bytes)})" if self.messages else "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """One device in one mini-batch.

    Args:
        device: its number in the pipeline.
        stages: indices of the stages that it holds.
        idle: fraction of the step, or without a flush of the period, in which it does not compute.
        peak_bytes: peak memory; 0 if unknown.
        memory_bytes: its memory limit; 0 if unknown.
        in_flight: most micro-batches in flight at a time, over all its stages.
        sent: messages to other devices.
        received: messages from other devices.
    """

    device: int
    stages: tuple[int, ...]
    idle: float
    peak_bytes: float
    memory_bytes: float
    in_flight: int
    sent: Traffic
    received: Traffic


def device_figures(prediction: Prediction) -> tuple[DeviceFigures, ...]:
    """The figures of every device; compiles the prediction's program."""
    plan, drawn = prediction.plan, prediction.drawn
    training = any(span.action.kind in RELEASES for spans in drawn.devices for span in spans)
    program = compile_program(plan, training=training, copies=prediction.num_pipelines)
    sent, received = _traffic(program)
    unknown = (0.0,) * plan.num_devices
    return tuple(
        DeviceFigures(
            device=device,
            stages=plan.stages_on(device),
            idle=prediction.idle_fractions[device],
            peak_bytes=(prediction.peak_bytes or unknown)[device],
            memory_bytes=(prediction.memory_bytes or unknown)[device],
            in_flight=_in_flight(training, (span.action for span in drawn.devices[device])),
            sent=sent[device],
            received=received[device],
        )
        for device in range(plan.num_devices)
    )


def _traffic(program: Program) -> tuple[list[Traffic], list[Traffic]]:
    sent, received = ([Traffic()] * len(program.devices) for _ in range(2))
    for message in program.messages:
        if message.src != message.dst:
            one = Traffic(1, program.plan.edges[message.edge].bytes.at(message.stop - message.start))
            sent[message.src] += one
            received[message.dst] += one
    return sent, received


def _in_flight(training: bool, actions: Iterable[Action]) -> int:
    now = most = 0
    for action in actions:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.kind in RELEASES if training else action.kind is Kind.FORWARD
    return most


HEADER: Final = ("devices", "holds", "idle", "peak memory", "in flight", "sent", "received")


def devices_text(figures: Sequence[DeviceFigures], width: int | None = None) -> str:
    """A table with one row per device; neighbours that look the same share a row."""
    rows = [_joined(list(group)) for _, group in groupby(map(_row, figures), key=lambda row: row[1:])]
    return markdown(HEADER, rows, width)


def _row(entry: DeviceFigures) -> list[str]:
    return [
        str(entry.device),
        _stages(entry.stages),
        percent(entry.idle),
        _memory(entry.peak_bytes, entry.memory_bytes),
        str(entry.in_flight),
        str(entry.sent),
        str(entry.received),
    ]


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
