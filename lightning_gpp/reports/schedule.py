"""Figures of a program on every device: idle time, memory, messages, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.table import chosen, kept_columns
from lightning_gpp.reports.units import percent, size
from lightning_gpp.schedules import Action, Instruction, Kind, Program, compile_program
from lightning_gpp.schedules.actions import RELEASES
from lightning_gpp.simulation import Timeline


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
        bubble_fraction: fraction of the step in which it does not compute.
        peak_bytes: peak memory.
        in_flight: most micro-batches in flight at a time, over all its stages.
        sent: messages to other devices.
        received: messages from other devices.
        unshards: all-gathers of a stage's parameters.
        reshards: number of times that unsharded parameters are freed.
        reductions: reductions of a stage's gradients.
    """

    device: int
    stages: tuple[int, ...]
    bubble_fraction: float
    peak_bytes: float
    in_flight: int
    sent: Traffic = Traffic()
    received: Traffic = Traffic()
    unshards: int = 0
    reshards: int = 0
    reductions: int = 0

    @property
    def traffic(self) -> Traffic:
        """Messages both ways."""
        return self.sent + self.received


def device_figures(prediction: Prediction) -> tuple[DeviceFigures, ...]:
    """The figures of every device of a prediction; without a flush, idle time is that of the period.

    Compiles its program.
    """
    timeline, drawn = prediction.timeline, prediction.drawn
    training = any(span.action.kind in RELEASES for spans in timeline.devices for span in spans)
    program = compile_program(prediction.plan, training=training, copies=prediction.num_pipelines)
    return tuple(
        replace(
            entry,
            bubble_fraction=prediction.idle_fractions[entry.device],
            peak_bytes=prediction.peak_bytes[entry.device],
            in_flight=_in_flight(training, [span.action for span in drawn.devices[entry.device]]),
        )
        for entry in schedule_figures(program, timeline)
    )


def schedule_figures(program: Program, timeline: Timeline) -> tuple[DeviceFigures, ...]:
    """The figures of all devices.

    Args:
        program: the program of one pipeline.
        timeline: its simulated timeline.
    """
    sent, received = _traffic(program)
    bubbles = timeline.bubble_fractions
    return tuple(
        DeviceFigures(
            device=device,
            stages=program.plan.stages_on(device),
            bubble_fraction=bubbles[device],
            peak_bytes=timeline.peak_bytes[device],
            in_flight=_in_flight(program.training, actions),
            sent=sent[device],
            received=received[device],
            **_collectives(actions),
        )
        for device, actions in enumerate(map(_actions, program.devices))
    )


def _actions(instructions: Iterable[Instruction]) -> list[Action]:
    return [instruction.action for instruction in instructions if instruction.action is not None]


def _traffic(program: Program) -> tuple[list[Traffic], list[Traffic]]:
    sent, received = ([Traffic()] * len(program.devices) for _ in range(2))
    for message in program.messages:
        if message.src != message.dst:
            edge = program.plan.edges[message.edge]
            one = Traffic(1, edge.bytes.at(message.stop - message.start))
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


def _collectives(actions: Iterable[Action]) -> dict[str, int]:
    kinds = Counter(action.kind for action in actions)
    return {"unshards": kinds[Kind.UNSHARD], "reshards": kinds[Kind.RESHARD], "reductions": kinds[Kind.REDUCE]}


HEADER = (
    "devices",
    "holds",
    "idle",
    "peak memory",
    "in flight",
    "sent",
    "received",
    "unshards",
    "reshards",
    "reductions",
)
IMPORTANCE = (
    *("devices", "holds", "idle", "peak memory", "in flight"),
    *("sent", "received", "unshards", "reductions", "reshards"),
)
"""The columns in the order in which they keep their place in a narrow table."""

_ALWAYS = 5  # columns that are left out only for their width


def schedule_text(figures: Sequence[DeviceFigures], width: int | None = None) -> str:
    """A table with one row per device, for one mini-batch.

    Neighbours that look the same share a row. Empty columns are left out, and those that do not fit the width.
    """
    rows = [_joined(list(group)) for _, group in groupby(map(_row, figures), key=lambda row: row[1:])]
    used = [i for i in range(len(HEADER)) if i < _ALWAYS or any(row[i] not in ("-", "0") for row in rows)]
    header, rows = [HEADER[i] for i in used], [[row[i] for i in used] for row in rows]
    importance = [name for name in IMPORTANCE if name in header]
    return "\n".join(chosen(header, rows, kept_columns(header, rows, importance, width), width))


def _row(entry: DeviceFigures) -> list[str]:
    return [
        str(entry.device),
        _stages(entry.stages),
        percent(entry.bubble_fraction),
        size(entry.peak_bytes),
        str(entry.in_flight),
        str(entry.sent),
        str(entry.received),
        *(str(number) for number in (entry.unshards, entry.reshards, entry.reductions)),
    ]


def _stages(stages: Sequence[int]) -> str:
    noun = "stage" if len(stages) == 1 else "stages"
    return f"{noun} {', '.join(map(str, stages))}" if stages else "nothing"


def _joined(rows: Sequence[list[str]]) -> list[str]:
    first, last = rows[0], rows[-1]
    return first if len(rows) == 1 else [f"{first[0]}-{last[0]}", *first[1:]]
