"""What a run tells about itself: the plan at the start, a simulated timeline, and a measured trace."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import GPPError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning import estimate
from lightning_gpp.reports import compare_timelines, comparison_text, plan_table, timeline_text
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Span, StageCosts, Timeline, simulate
from lightning_gpp.simulation.timeline import trace_style
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.machine import Machine
from lightning_gpp.training.measured import Timings, gathered

COMPARED: Final = 100
"""How many of the last mini-batches are compared with the simulation."""

QUEUED: Final = (
    "The devices work through a queue: measured is how long it takes to queue an action, not to run it. torch.profiler "
    "tells the latter; its traces have the same names of actions."
)
"""For every device but the CPU."""


def announce_plan(plan: Plan, num_pipelines: int) -> None:
    """Print the plan, on global rank zero."""
    copies = f", {num_pipelines} pipelines" if num_pipelines > 1 else ""
    rank_zero_info(f"The plan{copies}:\n{plan_table(plan)}")
    if len([stage for stage in plan.stages if stage.modules != (STEP,)]) == 1 and len(plan.stages[0].devices) > 1:
        rank_zero_info(
            "All devices share one stage: for this model data parallelism alone is estimated to be fastest. "
            "strategy.max_replicas=1 makes a pipeline with one stage per device."
        )


def simulated(plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int = 1) -> Timeline:
    """The timeline of one mini-batch on a machine; where nothing is known of costs, all actions take the same time.

    Raises:
        PlanError: the machine has fewer devices than the plan.
    """
    known = machine.costs is not None or any(operator.flops.at(1) for operator in graph)
    costs = _costs(plan, graph, machine, num_pipelines) if known else StageCosts.uniform(plan)
    return simulate(compile_program(plan, copies=num_pipelines), costs)


def _costs(plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int) -> StageCosts:
    cluster, needed = machine.cluster, plan.num_devices * num_pipelines
    if cluster.num_devices < plan.num_devices:
        raise PlanError(
            f"The plan needs {plan.num_devices} devices, the cluster {cluster.name!r} has {cluster.num_devices}. Give "
            "the cluster more (cluster.num_nodes, cluster.num_devices), or make a plan for it."
        )
    copies = num_pipelines if cluster.num_devices >= needed else 1
    costs = machine.costs or Roofline(graph)
    return estimate(graph, plan, cluster, costs, footprint=machine.footprint, num_pipelines=copies)


class TraceFile:
    """Collects when this rank ran which action; writes it in the form that Perfetto and chrome://tracing read, and at
    the end what was simulated against what was measured."""

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
        executor, number = engine.current.latest, engine.step - 1
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
        """On global rank zero: print the simulated times against the measured ones of all ranks, and write them beside
        the trace. All ranks must call it, after a run without failures."""
        plan, graph = engine.plan, engine.graph
        if not self._latest or plan is None or graph is None:
            return
        measured = gathered(self._alike(plan.batch_size), plan, self.control)
        if self.control.rank != 0:
            return
        try:
            expected = simulated(plan, graph, engine.machine(), self.control.num_pipelines)
            table = comparison_text(compare_timelines(expected, measured))
        except GPPError as error:
            rank_zero_info(f"Simulated and measured times are not compared: {error}")
            return
        heading = f"Simulated and measured, mean of {len(measured)} mini-batches of {plan.batch_size} samples:"
        text = "\n".join([heading, table, *([] if engine.device.type == "cpu" else [QUEUED])])
        rank_zero_info(text)
        drawn = (("One mini-batch, simulated", expected), ("The last one, measured", measured[-1]))
        parts = [text, *(f"{name}:\n{timeline_text(timeline)}" for name, timeline in drawn)]
        (self.path.parent / "gpp-trace-compared.txt").write_text("\n\n".join(parts) + "\n")

    def _alike(self, batch_size: int) -> dict[int, Timings]:
        """By their numbers the latest mini-batches of that size, if possible without the first one of the run, which
        also makes what the others use."""
        alike = {number: timings for number, size, timings in self._latest if size == batch_size}
        later = {number: timings for number, timings in alike.items() if number != self._first}
        return later or alike
