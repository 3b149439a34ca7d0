"""The trace of a run: the times of all actions, and at the end a comparison of simulated and measured times."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from lightning_gpp.errors import ConfigError, GPPError, ScheduleError
from lightning_gpp.planning import Prediction
from lightning_gpp.planning.problem.prediction import memory_limits
from lightning_gpp.reports import comparison_text, timeline_text
from lightning_gpp.reports.report import report_html
from lightning_gpp.schedules import Action, Program
from lightning_gpp.simulation import Period, Span, Timeline, TraceEvents
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.measured.machine import simulated, without_flush

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
    """Collects the times of this rank's actions, and writes those of all ranks for Perfetto and chrome://tracing.

    At the end it compares simulated and measured times.

    Attributes:
        measured: timelines of mini-batches of the plan's size, on global rank 0 after `finish`.
    """

    def __init__(self, folder: str, control: Control) -> None:
        self.folder, self.control = Path(folder), control
        if control.first:  # before training, whose end would be the time to learn of it
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"strategy.trace=true cannot write to {folder}: {error.strerror}.") from error
        self.measured: list[Timeline] = []
        self._steps: dict[int, Timings] = {}
        self._programs: dict[int, Program] = {}
        """The program of every mini-batch, by its number; mini-batches of one size share theirs."""

    def add(self, engine: Engine) -> None:
        """Add the timings of the mini-batch that ran last."""
        if engine.current is None or engine.current.latest is None:
            return
        executor, number = engine.current.latest, engine.num_steps - 1
        self._steps[number] = tuple(executor.timings)
        self._programs[number] = executor.program

    def finish(self, engine: Engine) -> None:
        """Write the trace of all ranks, and compare it with the simulation, on global rank 0.

        All ranks must call it, after a run without failures.
        """
        steps = gathered(self._steps, self.control)
        if self.control.rank != 0 or not steps:
            return
        timelines = {key: self._timeline(key[1], rows) for key, rows in steps.items()}
        self._save(timelines)
        if not engine.ahead():  # otherwise no mini-batch has a timeline of its own
            alike = self._alike(engine.plan.batch_size)
            self.measured = [timeline for (_, number), timeline in timelines.items() if number in alike]
            self._compare(engine)

    def _save(self, timelines: Mapping[tuple[int, int], Timeline]) -> None:
        """Write timelines by pipeline and number of the mini-batch."""
        trace, several = TraceEvents(), self.control.num_pipelines > 1
        for (pipeline, number), timeline in timelines.items():
            trace.add(timeline, pipeline=pipeline if several else None, details={"mini_batch": number})
        trace.save(self.folder / "gpp-trace.json")

    def _timeline(self, number: int, rows: Sequence[tuple[Span, ...]]) -> Timeline:
        stages = self._programs[number].plan.stages
        return Timeline(stages=tuple(stage.name for stage in stages), devices=tuple(rows))

    def _compare(self, engine: Engine) -> None:
        """Print a comparison of simulated and measured times, and write it beside the trace."""
        plan = engine.plan
        try:
            expected = simulated(plan, engine.graph, engine.machine(), self.control.num_pipelines)
            table = comparison_text(expected, self.measured)
        except GPPError as error:
            engine.job.host.inform(f"Simulated and measured times are not compared: {error}")
            return
        heading = f"Simulated and measured, mean of {len(self.measured)} mini-batches of {plan.batch_size} samples:"
        text = "\n".join([heading, table, *([] if engine.device.type == "cpu" else [QUEUED])])
        engine.job.host.inform(text)
        drawn = (("One mini-batch, simulated", expected), ("The last one, measured", self.measured[-1]))
        parts = [text, *(f"{name}:\n{timeline_text(timeline)}" for name, timeline in drawn)]
        (self.folder / "gpp-trace-compared.txt").write_text("\n\n".join(parts) + "\n")

    def _alike(self, batch_size: int) -> set[int]:
        """The numbers of the latest mini-batches of a size.

        If possible, the run's first one, which also compiles the executor, is left out.
        """
        latest = list(self._programs)[-COMPARED:]
        alike = {number for number in latest if self._programs[number].batch_size == batch_size}
        return alike - {next(iter(self._programs))} or alike


def gathered(timings: Mapping[int, Timings], control: Control) -> dict[tuple[int, int], list[tuple[Span, ...]]]:
    """The spans of all devices, by pipeline and mini-batch, on all ranks. All ranks must call it.

    Processes of one machine read the same clock. Clocks of different machines are aligned at a barrier, which all leave
    at about the same time; times are as exact as that.

    Args:
        timings: timings of this rank, by the number of the mini-batch; all ranks of a pipeline have the same numbers.
        control: the side channel of this rank.
    """
    control.barrier()
    ranks = control.gather((socket.gethostname(), time.perf_counter(), dict(timings)))
    host, clock, _ = ranks[0]
    shifts = [0.0 if other == host else clock - theirs for other, theirs, _ in ranks]
    members = {pipeline: control.mesh.pipeline_ranks(pipeline) for pipeline in range(control.num_pipelines)}
    return {
        (pipeline, number): [_spans(ranks[rank][2][number], shifts[rank]) for rank in group]
        for pipeline, group in members.items()
        for number in sorted(ranks[group[0]][2])
    }


def _spans(timings: Timings, shift: float) -> tuple[Span, ...]:
    return tuple(Span(action, start + shift, stop + shift) for action, start, stop in timings)


def write_report(path: str | Path, engine: Engine, num_pipelines: int, trace: TraceFile | None) -> None:
    """Write plan, simulated and measured timelines as one HTML file.

    Raises:
        PlanError: the machine has fewer devices than the plan.
    """
    machine = engine.machine()
    prediction = Prediction(
        plan=engine.plan,
        num_pipelines=num_pipelines,
        timeline=simulated(engine.plan, engine.graph, machine, num_pipelines),
        memory_bytes=memory_limits(engine.plan, machine.cluster),
        period=period_of(engine, num_pipelines),
    )
    title = f"{type(engine.job.module).__name__} on {machine.cluster.name}"
    measured = () if trace is None else trace.measured
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(report_html(prediction, title=title, measured=measured), encoding="utf-8")


def period_of(engine: Engine, num_pipelines: int) -> Period | None:
    """The simulated steady state of training without a flush; None if the pipeline flushes, is one device, or the
    weight policy allows it only for accumulated mini-batches.
    """
    if engine.plan.num_devices == 1:
        return None
    with suppress(ScheduleError):  # accumulated mini-batches, which are not known here, may allow more than the policy
        return without_flush(engine.plan, engine.graph, engine.machine(), num_pipelines, engine.job.options.weights)
    return None
