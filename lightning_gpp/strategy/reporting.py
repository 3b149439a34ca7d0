"""What a run tells about itself: the plan at the start, a simulated timeline, and a measured trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning import estimate
from lightning_gpp.reports import plan_table
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.engine import Engine
from lightning_gpp.strategy.machine import Machine


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
    """Collects when this rank ran which action; writes it in the form that Perfetto and chrome://tracing read."""

    def __init__(self, folder: str, control: Control) -> None:
        self.path = Path(folder) / f"gpp-trace-rank{control.rank}.json"
        self.control = control
        self._events: list[dict[str, Any]] = []

    def add(self, engine: Engine) -> None:
        """Add the timings of the mini-batch that ran last."""
        if engine.current is None or engine.current.latest is None:
            return
        plan = engine.current.plan
        for action, start, stop in engine.current.latest.timings:
            event = {
                "name": f"{action} {plan.stages[action.stage].name}",
                "ph": "X",
                "ts": start * 1e6,
                "dur": (stop - start) * 1e6,
                "pid": self.control.pipeline,
                "tid": self.control.device,
                "args": {"mini_batch": engine.step - 1, "micro_batch": action.micro_batch},
            }
            self._events.append(event)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"traceEvents": self._events}))
