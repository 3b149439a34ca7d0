"""The plan as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.reports.units import count, counted, size
from lightning_gpp.schedules import in_flight

HEADER = (
    "stage",
    "modules",
    "devices",
    "samples",
    "parameters",
    "FLOPs",
    "activations",
    "in-edges",
    "out-edges",
    "in flight",
)
"""Samples, FLOPs (of a forward), activations and bytes of edges are those of one micro-batch. Activations marked
"recomputed" are not kept: the stage computes them again for its backward.
"""

LEFT_ALIGNED = ("stage", "modules", "in-edges", "out-edges", "partitioner", "schedule", "action")


def plan_table(plan: Plan, batch_size: int | None = None, modules_width: int = 44) -> str:
    """One row per stage, and a line that sums up the plan.

    Args:
        plan: the plan; edges name stages by their number in the first column, and the user's step before the network as
            "data".
        batch_size: samples of the mini-batch; the plan's own by default.
        modules_width: characters after which a list of modules is cut.

    Raises:
        ScheduleError: the plan's schedule is unknown or cannot run.
    """
    flights = in_flight(plan, batch_size)
    rows = [_row(plan, stage, flights[stage], modules_width) for stage in range(len(plan.stages))]
    return "\n".join([*markdown(HEADER, rows), "", summary(plan, batch_size)])


def summary(plan: Plan, batch_size: int | None = None) -> str:
    """Numbers of stages and devices, depth, schedule, and the micro-batches of the mini-batch."""
    total = plan.batch_size if batch_size is None else batch_size
    counts = sorted({len(plan.intervals(stage, total)) for stage in range(len(plan.stages))})
    micro_batches = "/".join(map(str, counts))
    stages, devices = counted(len(plan.stages), "stage"), counted(plan.num_devices, "device")
    return (
        f"{stages} on {devices}, depth {plan.depth}, schedule {plan.schedule}, "
        f"mini-batch of {total} samples in {micro_batches} micro-batches"
    )


def _row(plan: Plan, index: int, flight: int, modules_width: int) -> list[str]:
    stage = plan.stages[index]
    figures, samples = stage.figures, stage.micro_batch_size
    modules = ", ".join(module or "(whole model)" for module in stage.modules)
    return [
        f"{index} {stage.name}",
        modules if len(modules) <= modules_width else f"{modules[: modules_width - 3]}...",
        ",".join(map(str, stage.devices)),
        str(samples),
        count(figures.num_parameters),
        count(figures.flops.at(samples)),
        size(figures.activation_bytes.at(samples)) + (" (recomputed)" if stage.recompute else ""),
        _ends(((edge.src, edge) for edge in plan.edges if edge.dst == index), samples),
        _ends(((edge.dst, edge) for edge in plan.edges if edge.src == index), samples),
        str(flight),
    ]


def _ends(edges: Iterable[tuple[int, Edge]], num_samples: int) -> str:
    return ", ".join(_end(other, edge, num_samples) for other, edge in edges) or "-"


def _end(other: int, edge: Edge, num_samples: int) -> str:
    name = "data" if other == SOURCE else str(other)
    return f"{name} ({'order' if edge.artificial else size(edge.bytes.at(num_samples))})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    left = [name in LEFT_ALIGNED for name in header]
    rule = ["-" * width if side else "-" * (width - 1) + ":" for width, side in zip(widths, left, strict=True)]
    return [_line(row, widths, left) for row in (header, rule, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    padded = (
        cell.ljust(width) if side else cell.rjust(width) for cell, width, side in zip(cells, widths, left, strict=True)
    )
    return f"| {' | '.join(padded)} |"
