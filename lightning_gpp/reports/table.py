"""The plan as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_gpp.plan import Plan, Stage
from lightning_gpp.reports.terminal import markdown, wrapped
from lightning_gpp.reports.units import count, size
from lightning_gpp.schedules import in_flight
from lightning_gpp.wording import counted

HEADER: Final = ("stage", "modules", "devices", "samples", "parameters", "FLOPs", "activations", "in flight")
"""Samples, and FLOPs of a forward, are those of one micro-batch. Activations are what a stage keeps of one for its
backward; where it is "recomputed", or blocks of it are, it keeps their inputs; where it is "offloaded", all but its
inputs lie in host memory in between.
"""


def plan_table(plan: Plan, width: int | None = None, flights: Mapping[int, int] | None = None) -> str:
    """One row per stage, and a line that sums up the plan.

    Args:
        plan: the plan.
        width: characters of a line.
        flights: micro-batches in flight on every stage; by default those of a mini-batch with a flush.

    Raises:
        ScheduleError: the plan's schedule is unknown or cannot run.
    """
    flights = flights or in_flight(plan)
    table = markdown(HEADER, [_row(plan, stage, flights[stage]) for stage in range(len(plan.stages))], width)
    total = summary(plan)
    return f"{table}\n\n{total if width is None else wrapped(total, width)}"


def summary(plan: Plan) -> str:
    """Numbers of stages and devices, depth, schedule, and the micro-batches of the mini-batch."""
    stages, devices = counted(len(plan.stages), "stage"), counted(plan.num_devices, "device")
    used = f"{plan.num_devices - len(plan.unused)} of " * bool(plan.unused)
    processes = f" ({plan.num_processes} processes)" * (plan.num_processes > plan.num_devices)
    return (
        f"{stages} on {used}{devices}{processes}, depth {plan.depth}, schedule {plan.schedule}, "
        f"mini-batch of {plan.batch_size} samples in {_micro_batches(plan)}"
    )


def _micro_batches(plan: Plan) -> str:
    """The number of micro-batches of a mini-batch; several numbers if stages have micro-batches of different sizes."""
    counts = sorted({len(plan.intervals(stage)) for stage in range(len(plan.stages))})
    return "1 micro-batch" if counts == [1] else f"{'/'.join(map(str, counts))} micro-batches"


def _row(plan: Plan, index: int, flight: int) -> list[str]:
    stage = plan.stages[index]
    figures, samples = stage.figures, stage.micro_batch_size
    return [
        f"{index} {stage.name}",
        _extent(stage.modules),
        ",".join(map(str, stage.devices)) + _in_brackets(_members(stage)),
        str(samples),
        count(figures.num_parameters),
        count(figures.flops.at(samples)),
        size((figures.activation_bytes + figures.offloaded_bytes).at(samples)) + _in_brackets(measures(stage)),
        str(flight),
    ]


def _extent(modules: Sequence[str]) -> str:
    shown = [module or "(whole model)" for module in modules]
    return ", ".join(shown) if len(shown) <= 3 else f"{shown[0]}, ..., {shown[-1]} ({len(shown)} modules)"


def _members(stage: Stage) -> str:
    """The processes of each of its devices, if these are several."""
    return f"{stage.tensor_parallel_size} processes" if stage.tensor_parallel_size > 1 else ""


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def measures(stage: Stage) -> str:
    """The blocks that a stage recomputes, or that it does as a whole, and whether it offloads, in words."""
    number = len(stage.recomputed_blocks)
    again = f"{number} block{'s' * (number > 1)} recomputed" if number else "recomputed" * stage.reruns
    return ", ".join(filter(None, [again, "offloaded" * stage.offload]))
