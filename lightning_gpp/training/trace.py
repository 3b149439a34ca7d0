"""The trace of a run: times of this rank's actions, and at the end a comparison of simulated and measured times."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning_gpp.errors import GPPError
from lightning_gpp.plan import Plan
from lightning_gpp.reports import compare_timelines, comparison_text, timeline_text
from lightning_gpp.schedules import Action
from lightning_gpp.simulation import Span, Timeline
from lightning_gpp.simulation.timeline import trace_style
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.predicted import simulated

COMPARED: Final = 100
"""Number of the last mini-batches that are compared with the simulation."""

QUEUED: Final = (
    "The devices work through a queue, so measured times are those of queueing an action, not of running it. "
    "torch.profiler measures the latter; its traces have the same names of actions."
)
"""Note for all devices except the CPU."""

Timings: TypeAlias = "Sequence[tuple[Action, float, float]]"
"""The work of a device in one mini-batch: action, start and stop, in seconds of its own clock."""


class TraceFile:
    """Collects the times of this rank's actions and writes them for Perfetto and chrome://tracing.

    At the end it compares simulated and measured times.
    """

    def __init__(self, folder: str, control: Control) -> None:
        self.path = Path(folder) / f"gpp-trace-rank{control.rank}.json"
        self.control = control
        self._events: list[dict[str, Any]] = []
        self._first: int | None = None
        self._latest: deque[tuple[int, int, Timings]] = deque(maxlen=COMPARED)

    def add(self, engine: Engine) -> None:
        """Add the timings of the mini-batch that ran last."""
        if engine.current is None or engine.current.latest is None:
            return
        executor, number = engine.current.latest, engine.num_steps - 1
        self._first = number if self._first is None else self._first
        self._latest.append((number, executor.program.batch_size, tuple(executor.timings)))
        names = [stage.name for stage in engine.current.plan.stages]
        self._events += [self._event(names, number, Span(*timing)) for timing in executor.timings]

    def _event(self, names: Sequence[str], number: int, span: Span) -> dict[str, Any]:
        action = span.action
        return {
            "name": f"{action} {names[action.stage]}",
            "ph": "X",
            **trace_style(action.kind),
            "ts": span.start * 1e6,
            "dur": (span.stop - span.start) * 1e6,
            "pid": self.control.pipeline,
            "tid": self.control.device,
            "args": {"mini_batch": number, "micro_batch": action.micro_batch},
        }

    def write(self) -> None:
        """Write this rank's trace, if it trained."""
        if self._latest:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"traceEvents": [*self._labels(), *self._events]}))

    def _labels(self) -> list[dict[str, Any]]:
        pipeline, device = self.control.pipeline, self.control.device
        return [
            {"name": name, "ph": "M", "pid": pipeline, "tid": device, "args": {"name": label}}
            for name, label in (("process_name", f"pipeline {pipeline}"), ("thread_name", f"device {device}"))
        ]

    def compare(self, engine: Engine) -> None:
        """Print a comparison of simulated times with those measured on all ranks, and write it beside the trace, on
        global rank 0. All ranks must call it, after a run without failures.
        """
        plan, graph = engine.plan, engine.graph
        if not self._latest or engine.ahead():  # without a flush, no mini-batch has a timeline of its own
            return
        measured = gathered(self._alike(plan.batch_size), plan, self.control)
        if self.control.rank != 0:
            return
        try:
            expected = simulated(plan, graph, engine.machine(), self.control.num_pipelines)
            table = comparison_text(compare_timelines(expected, measured))
        except GPPError as error:
            engine.job.host.inform(f"Simulated and measured times are not compared: {error}")
            return
        heading = f"Simulated and measured, mean of {len(measured)} mini-batches of {plan.batch_size} samples:"
        text = "\n".join([heading, table, *([] if engine.device.type == "cpu" else [QUEUED])])
        engine.job.host.inform(text)
        drawn = (("One mini-batch, simulated", expected), ("The last one, measured", measured[-1]))
        parts = [text, *(f"{name}:\n{timeline_text(timeline)}" for name, timeline in drawn)]
        (self.path.parent / "gpp-trace-compared.txt").write_text("\n\n".join(parts) + "\n")

    def _alike(self, batch_size: int) -> dict[int, Timings]:
        """The latest mini-batches of a size by their numbers.

        If possible, the run's first one, which also compiles the executor, is left out.
        """
        alike = {number: timings for number, size, timings in self._latest if size == batch_size}
        later = {number: timings for number, timings in alike.items() if number != self._first}
        return later or alike


def gathered(timings: Mapping[int, Timings], plan: Plan, control: Control) -> list[Timeline]:
    """The timelines of all mini-batches and pipelines, on all ranks. All ranks must call it.

    Processes of one machine read the same clock. Clocks of different machines are aligned at a barrier, which all leave
    at about the same time; times are as exact as that.

    Args:
        timings: timings of this rank, by the number of the mini-batch; all ranks of a pipeline have the same numbers.
        plan: the plan of the stages.
        control: the side channel of this rank.
    """
    control.barrier()
    ranks = control.gather((socket.gethostname(), time.perf_counter(), dict(timings)))
    (host, clock, _), timelines = ranks[0], []
    shifts = [0.0 if other == host else clock - theirs for other, theirs, _ in ranks]
    for pipeline in range(control.num_pipelines):
        members = [control.mesh.global_rank(device, pipeline) for device in range(control.num_devices)]
        for number in sorted(ranks[members[0]][2]):
            spans = (_spans(ranks[rank][2][number], shifts[rank]) for rank in members)
            timelines.append(Timeline(stages=tuple(stage.name for stage in plan.stages), devices=tuple(spans)))
    return timelines


def _spans(timings: Timings, shift: float) -> tuple[Span, ...]:
    return tuple(Span(action, start + shift, stop + shift) for action, start, stop in timings)
