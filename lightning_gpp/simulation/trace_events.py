"""Timelines as events of the Trace Event Format, for ui.perfetto.dev: one file for all devices, with their messages.

Every device is a process with the threads `compute`, `receive from device n`, `collectives`, `copies to the host` and
`copies from the host`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_gpp.schedules import Kind
from lightning_gpp.simulation.timeline import Collective, HostCopy, Span, Timeline, Transfer

Event = dict[str, Any]


class TraceEvents:
    """The events of timelines, each of one mini-batch of one pipeline."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._labels: dict[tuple[int, int | None], str] = {}

    def add(
        self,
        timeline: Timeline,
        *,
        pipeline: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a timeline; times become microseconds.

        Args:
            timeline: simulated or measured.
            pipeline: its number if there are several; they have processes of their own.
            details: entries of every action, such as the number of the mini-batch.
        """
        first = (pipeline or 0) * len(timeline.devices)
        prefix = "" if pipeline is None else f"pipeline {pipeline}, "
        for device in range(len(timeline.devices)):
            self._labels[first + device, None] = f"{prefix}device {device}"
            self._labels[first + device, 0] = "compute"
        for device, thread, label, event in _events(timeline, details or {}):
            self._labels[first + device, thread] = label
            self._events.append({**event, "pid": first + device, "tid": thread})

    @property
    def events(self) -> list[Event]:
        """Names of processes and threads, then all events by their times."""
        names = [
            _name("process_name" if thread is None else "thread_name", process, thread or 0, label)
            for (process, thread), label in sorted(self._labels.items(), key=str)
        ]
        return [*names, *sorted(self._events, key=lambda event: event["ts"])]

    def save(self, path: str | Path) -> None:
        """Write the events as JSON."""
        Path(path).write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))


def trace_of(timeline: Timeline) -> TraceEvents:
    """The trace of a simulated timeline."""
    trace = TraceEvents()
    trace.add(timeline)
    return trace


def _events(timeline: Timeline, details: Mapping[str, Any]) -> Iterator[tuple[int, int, str, Event]]:
    """All events with their devices and threads, and the names of these threads."""
    after = 1 + len(timeline.devices)  # the threads behind those of the receives
    for device, spans in enumerate(timeline.devices):
        for span in spans:
            name = span.action.kind.name
            about = {"stage": timeline.stages[span.action.stage], "kind": name, **details}
            yield device, 0, "compute", _event(str(span.action), name, span, about)
    for transfer in timeline.transfers:
        name, about = f"{transfer.producer} to {transfer.consumer}", {"message": transfer.message}
        event = _event(name, "transfer", transfer, {**about, "bytes": transfer.num_bytes})
        yield transfer.dst, 1 + transfer.src, f"receive from device {transfer.src}", event
    for operation, kind, entries in (
        ("reduce gradients", Kind.REDUCE, timeline.reductions),
        ("gather parameters", Kind.UNSHARD, timeline.all_gathers),
    ):
        for entry in entries:
            event = _event(f"{operation} of {timeline.stages[entry.stage]}", kind.name, entry, {"stage": entry.stage})
            yield from ((device, after, "collectives", event) for device in entry.devices)
    for copy in timeline.host_copies:
        back = copy.action.kind is Kind.LOAD
        event = _event(str(copy.action), copy.action.kind.name, copy, {"bytes": copy.num_bytes})
        yield copy.device, after + 1 + back, f"copies {'from' if back else 'to'} the host", event


def _event(name: str, category: str, span: Span | Transfer | Collective | HostCopy, about: Mapping[str, Any]) -> Event:
    times = {"ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
    return {"name": name, "ph": "X", "args": dict(about), "cat": category.lower(), **times}


def _name(label: str, process: int, thread: int, name: str) -> Event:
    return {"name": label, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
