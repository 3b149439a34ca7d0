"""What a run tells about itself: the plan at the start, a simulated timeline, and a measured trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_gpp.cluster import preset
from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.reports import plan_table
from lightning_gpp.schedules import compile_program
from lightning_gpp.planning import estimate
from lightning_gpp.simulation import StageCosts, Timeline, simulate
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.engine import Engine


def announce_plan(plan: Plan, num_pipelines: int) -> None:
    """Print the plan, on global rank zero."""
    copies = f", {num_pipelines} pipelines" if num_pipelines > 1 else ""
    rank_zero_info(f"The plan{copies}:\n{plan_table(plan)}")


def simulated(plan: Plan, graph: OperatorGraph) -> Timeline:
    """The timeline of one mini-batch, by roofline estimates; where nothing is known, all actions take the same time."""
    known = any(operator.flops.at(1) for operator in graph)
    cluster = preset("cpu_host", num_devices=plan.num_devices)
    costs = estimate(graph, plan, cluster, Roofline(graph)) if known else StageCosts.uniform(plan)
    return simulate(compile_program(plan), costs)


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
