"""The report of a run's plan, as a file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lightning_gpp.errors import ScheduleError
from lightning_gpp.planning import Prediction
from lightning_gpp.planning.problem.prediction import memory_limits
from lightning_gpp.reports.page import report_html
from lightning_gpp.simulation import Period
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.measured.predicted import simulated, without_flush
from lightning_gpp.training.measured.trace import TraceFile


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
