"""When what ran: the outcome of a simulation, or of a measurement. Every picture and every report stands on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from lightning_gpp.errors import ScheduleError
from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import RELEASES


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a device from `start` to `stop`, in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message (its id in the program) on its way from device `src` to device `dst`, in seconds."""

    message: int
    src: int
    dst: int
    producer: Action
    consumer: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """The replicas of a stage, on `devices`, sum their gradients from `start` to `stop`, in seconds."""

    stage: int
    devices: tuple[int, ...]
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans of every device in the order in which they ran, transfers between devices, and sums of gradients.

    `peak_bytes` for each device; `stages` are the stages' names, by index.
    """

    stages: tuple[str, ...]
    devices: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    peak_bytes: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last stop."""
        spans: list[Span | Reduction] = [*(span for device in self.devices for span in device), *self.reductions]
        return max((span.stop for span in spans), default=0) - min((span.start for span in spans), default=0)

    @property
    def busy(self) -> tuple[float, ...]:
        """For every device the seconds in which it computed."""
        return tuple(sum(span.stop - span.start for span in device) for device in self.devices)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """For every device the part of the makespan in which it did not compute."""
        makespan = self.makespan
        return tuple(1 - busy / makespan if makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Mean over the devices."""
        return sum(self.bubble_fractions) / max(1, len(self.devices))

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """For every stage the most micro-batches in flight on a replica."""
        return self._most(_peak)

    @property
    def warm_up(self) -> dict[int, int]:
        """For every stage the forwards before its first backward, on the replica with the most."""
        return self._most(_before_backward)

    def _most(self, count: Callable[[list[Kind]], int]) -> dict[int, int]:
        most: dict[int, int] = {}
        for device in self.devices:
            for stage in {span.action.stage for span in device}:
                kinds = [span.action.kind for span in device if span.action.stage == stage]
                most[stage] = max(most.get(stage, 0), count(kinds))
        return dict(sorted(most.items()))

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(_content(self)))

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote.

        Raises:
            ScheduleError: the file is missing, or is not a timeline.
        """
        try:
            return _timeline(json.loads(Path(path).read_text()))
        except OSError as error:
            raise ScheduleError(f"The timeline {path} cannot be read: {error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ScheduleError(
                f"The file {path} is not a timeline: {type(error).__name__}: {error}. Write one with Timeline.save()."
            ) from error

    def save_trace(self, path: str | Path) -> None:
        """Write for chrome://tracing and ui.perfetto.dev: one process per device, its receives in a second row."""
        Path(path).write_text(json.dumps({"traceEvents": trace_events(self), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The timeline as events of the Trace Event Format; times in microseconds."""
    events: list[dict[str, Any]] = []
    for device, spans in enumerate(timeline.devices):
        events += [_name("process_name", device, 0, f"device {device}"), _name("thread_name", device, 0, "compute")]
        for span in spans:
            stage = timeline.stages[span.action.stage]
            events.append(_event(str(span.action), span, device, 0, {"stage": stage, "kind": span.action.kind.name}))
    for reduction in timeline.reductions:
        name = f"sum gradients of {timeline.stages[reduction.stage]}"
        events += [_event(name, reduction, device, 0, {"stage": reduction.stage}) for device in reduction.devices]
    for src, dst in sorted({(transfer.src, transfer.dst) for transfer in timeline.transfers}):
        events.append(_name("thread_name", dst, 1 + src, f"receive from device {src}"))
    for transfer in timeline.transfers:
        name = f"{transfer.producer} to {transfer.consumer}"
        events.append(_event(name, transfer, transfer.dst, 1 + transfer.src, {"message": transfer.message}))
    return events


def _event(
    name: str, span: Span | Transfer | Reduction, process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "args": details, **times}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _peak(kinds: list[Kind]) -> int:
    if not any(kind in RELEASES for kind in kinds):
        return min(1, kinds.count(Kind.FORWARD))  # inference: a micro-batch is in flight only during its forward
    return max(accumulate((kind is Kind.FORWARD) - (kind in RELEASES) for kind in kinds))


def _before_backward(kinds: list[Kind]) -> int:
    backward = (Kind.BACKWARD, Kind.INPUT)
    return sum(kind is Kind.FORWARD for kind in takewhile(lambda kind: kind not in backward, kinds))


def _content(timeline: Timeline) -> dict[str, Any]:
    return {
        "stages": timeline.stages,
        "devices": [[[str(span.action), span.start, span.stop] for span in spans] for spans in timeline.devices],
        "transfers": [
            [entry.message, entry.src, entry.dst, str(entry.producer), str(entry.consumer), entry.start, entry.stop]
            for entry in timeline.transfers
        ],
        "reductions": [[entry.stage, entry.devices, entry.start, entry.stop] for entry in timeline.reductions],
        "peak_bytes": timeline.peak_bytes,
    }


def _timeline(content: dict[str, Any]) -> Timeline:
    return Timeline(
        stages=tuple(content["stages"]),
        devices=tuple(
            tuple(Span(Action.parse(action), start, stop) for action, start, stop in spans)
            for spans in content["devices"]
        ),
        transfers=tuple(
            Transfer(message, src, dst, Action.parse(producer), Action.parse(consumer), start, stop)
            for message, src, dst, producer, consumer, start, stop in content["transfers"]
        ),
        reductions=tuple(
            Reduction(stage, tuple(devices), start, stop) for stage, devices, start, stop in content["reductions"]
        ),
        peak_bytes=tuple(content["peak_bytes"]),
    )
