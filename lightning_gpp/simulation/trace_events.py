"""Timelines as events of the Trace Event Format, for ui.perfetto.dev: one file for all devices, with their messages.

Every device is a process with the threads `compute`, `receive from device n`, `collectives`, `copies to the host` and
`copies from the host`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        for device, spans in enumerate(timeline.devices):
            self._label(first + device, None, f"{prefix}device {device}")
            self._label(first + device, 0, "compute")
            for span in spans:
                self._events.append(_action(timeline, span, first + device, details or {}))
        for transfer in timeline.transfers:
            self._transfer(transfer, first)
        self._collectives(timeline, first)
        self._host_copies(timeline, first)

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

    def _label(self, process: int, thread: int | None, label: str) -> None:
        self._labels[process, thread] = label

    def _transfer(self, transfer: Transfer, first: int) -> None:
        """The message on the receiver's thread for the sender."""
        process, thread = first + transfer.dst, 1 + transfer.src
        self._label(process, thread, f"receive from device {transfer.src}")
        details = {"message": transfer.message, "bytes": transfer.num_bytes}
        event = _event(f"{transfer.producer} to {transfer.consumer}", transfer, process, thread, details)
        self._events.append({**event, "cat": "transfer"})

    def _collectives(self, timeline: Timeline, first: int) -> None:
        """Events of collectives, in a thread after those of the receives."""
        thread = 1 + len(timeline.devices)
        for operation, kind, entries in (
            ("reduce gradients", Kind.REDUCE, timeline.reductions),
            ("gather parameters", Kind.UNSHARD, timeline.all_gathers),
        ):
            for entry in entries:
                name = f"{operation} of {timeline.stages[entry.stage]}"
                for device in entry.devices:
                    self._label(first + device, thread, "collectives")
                    event = _event(name, entry, first + device, thread, {"stage": entry.stage})
                    self._events.append({**event, "cat": kind.name.lower()})

    def _host_copies(self, timeline: Timeline, first: int) -> None:
        """Events of copies between devices and hosts, in a thread for each direction after that of the collectives."""
        for entry in timeline.host_copies:
            leaves, process = entry.action.kind is Kind.OFFLOAD, first + entry.device
            thread = len(timeline.devices) + (2 if leaves else 3)
            self._label(process, thread, f"copies {'to' if leaves else 'from'} the host")
            event = _event(str(entry.action), entry, process, thread, {"bytes": entry.num_bytes})
            self._events.append({**event, "cat": entry.action.kind.name.lower()})


def trace_of(timeline: Timeline) -> TraceEvents:
    """The trace of a simulated timeline."""
    trace = TraceEvents()
    trace.add(timeline)
    return trace


def _action(timeline: Timeline, span: Span, process: int, details: Mapping[str, Any]) -> Event:
    stage, kind = timeline.stages[span.action.stage], span.action.kind
    event = _event(str(span.action), span, process, 0, {"stage": stage, "kind": kind.name, **details})
    return {**event, "cat": kind.name.lower()}


def _event(
    name: str, span: Span | Transfer | Collective | HostCopy, process: int, thread: int, details: Mapping[str, Any]
) -> Event:
    times = {"ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, "args": dict(details), **times}


def _name(label: str, process: int, thread: int, name: str) -> Event:
    return {"name": label, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
