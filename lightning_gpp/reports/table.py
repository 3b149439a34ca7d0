"""The plan as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.reports.terminal import wrapped
from lightning_gpp.reports.units import count, size
from lightning_gpp.schedules import in_flight
from lightning_gpp.wording import counted

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
"""Samples, FLOPs (of a forward), activations and bytes of edges are those of one micro-batch. Activations are what a
stage keeps for its backward; where it is "recomputed", or blocks of it are, it keeps their inputs; where it is
"offloaded", all but its inputs lie in host memory in between.
"""

IMPORTANCE = (
    *("stage", "devices", "parameters", "FLOPs", "activations", "in flight", "samples"),
    *("modules", "in-edges", "out-edges"),
)
"""The columns in the order in which they keep their place in a narrow table."""

LEFT_ALIGNED = ("stage", "modules", "in-edges", "out-edges", "partitioner", "schedule", "action", "holds")

NARROWEST = 14
"""Least width of a column whose cells may be cut."""


def plan_table(
    plan: Plan,
    batch_size: int | None = None,
    modules_width: int = 44,
    width: int | None = None,
    flights: Mapping[int, int] | None = None,
) -> str:
    """One row per stage, and a line that sums up the plan.

    Args:
        plan: the plan; edges name stages by their number in the first column, and the user's step before the network as
            "data".
        batch_size: samples of the mini-batch; the plan's own by default.
        modules_width: characters after which a list of modules is cut.
        width: characters of a line. Columns that have no place are left out; the modules of stages whose name does not
            tell them are then below the table.
        flights: micro-batches in flight on every stage; by default those of a mini-batch with a flush.

    Raises:
        ScheduleError: the plan's schedule is unknown or cannot run.
    """
    flights = flights or in_flight(plan, batch_size)
    rows = [_row(plan, stage, flights[stage], modules_width) for stage in range(len(plan.stages))]
    kept = kept_columns(HEADER, rows, IMPORTANCE, width, cut="modules")
    table = chosen(HEADER, rows, kept, width, cut="modules")
    below = _footnotes(plan, width) if width is not None else []
    total = summary(plan, batch_size)
    return "\n".join([*table, "", *below, total if width is None else wrapped(total, width)])


def _footnotes(plan: Plan, width: int) -> list[str]:
    """The modules of each stage whose name is shorter than they are."""
    lines = [
        f"{index} {stage.name}: {_extent(stage.modules)}"
        for index, stage in enumerate(plan.stages)
        if tuple(module for module in stage.modules if module != STEP) != (stage.name,)
    ]
    return [*(wrapped(line, width) for line in lines), *([""] if lines else [])]


def _extent(modules: Sequence[str]) -> str:
    shown = [module or "(whole model)" for module in modules]
    return ", ".join(shown) if len(shown) <= 3 else f"{shown[0]}, ..., {shown[-1]} ({len(shown)} modules)"


def summary(plan: Plan, batch_size: int | None = None) -> str:
    """Numbers of stages and devices, depth, schedule, and the micro-batches of the mini-batch."""
    total = plan.batch_size if batch_size is None else batch_size
    stages, devices = counted(len(plan.stages), "stage"), counted(plan.num_devices, "device")
    used = f"{plan.num_devices - len(plan.unused)} of " * bool(plan.unused)
    processes = f" ({plan.num_processes} processes)" * (plan.num_processes > plan.num_devices)
    return (
        f"{stages} on {used}{devices}{processes}, depth {plan.depth}, schedule {plan.schedule}, "
        f"mini-batch of {total} samples in {micro_batches(plan, total)}"
    )


def micro_batches(plan: Plan, batch_size: int) -> str:
    """The number of micro-batches of a mini-batch; several numbers if stages have micro-batches of different sizes."""
    counts = sorted({len(plan.intervals(stage, batch_size)) for stage in range(len(plan.stages))})
    return "1 micro-batch" if counts == [1] else f"{'/'.join(map(str, counts))} micro-batches"


def _row(plan: Plan, index: int, flight: int, modules_width: int) -> list[str]:
    stage = plan.stages[index]
    figures, samples = stage.figures, stage.micro_batch_size
    modules = ", ".join(module or "(whole model)" for module in stage.modules)
    return [
        f"{index} {stage.name}",
        modules if len(modules) <= modules_width else f"{modules[: modules_width - 3]}...",
        ",".join(map(str, stage.devices)) + _in_brackets(_members(stage)),
        str(samples),
        count(figures.num_parameters),
        count(figures.flops.at(samples)),
        size((figures.activation_bytes + figures.offloaded_bytes).at(samples)) + _in_brackets(measures(stage)),
        _ends(((edge.src, edge) for edge in plan.edges if edge.dst == index), samples),
        _ends(((edge.dst, edge) for edge in plan.edges if edge.src == index), samples),
        str(flight),
    ]


def _members(stage: Stage) -> str:
    """The processes of each of its devices, if these are several."""
    return f"{stage.tensor_parallel_size} processes" if stage.tensor_parallel_size > 1 else ""


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _ends(edges: Iterable[tuple[int, Edge]], num_samples: int) -> str:
    return ", ".join(_end(other, edge, num_samples) for other, edge in edges) or "-"


def _end(other: int, edge: Edge, num_samples: int) -> str:
    name = "data" if other == SOURCE else str(other)
    return f"{name} ({'order' if edge.artificial else size(edge.bytes.at(num_samples))})"


def measures(stage: Stage) -> str:
    """The blocks that a stage recomputes, or that it does as a whole, and whether it offloads, in words."""
    number = len(stage.recomputed_blocks)
    again = f"{number} block{'s' * (number > 1)} recomputed" if number else "recomputed" * stage.reruns
    return ", ".join(filter(None, [again, "offloaded" * stage.offload]))


def kept_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], importance: Sequence[str], width: int | None, cut: str = ""
) -> list[int]:
    """The columns that fit a width, at least the first: the least important are left out, `cut` counts as narrow."""
    kept = list(range(len(header)))
    for name in reversed(importance[1:]):
        if width is None or _width(header, rows, kept, cut) <= width:
            break
        kept.remove(header.index(name))
    return kept


def _width(header: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], cut: str) -> int:
    widths = (max(len(row[column]) for row in (header, *rows)) for column in kept)
    names = (header[column] for column in kept)
    return 1 + sum(
        3 + (min(NARROWEST, size) if name == cut else size) for name, size in zip(names, widths, strict=True)
    )


def chosen(
    header: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int | None, cut: str = ""
) -> list[str]:
    """The table of some columns; the cells of the column `cut` are as long as the width allows."""
    some = [[row[column] for column in kept] for row in (header, *rows)]
    if width is not None and cut in some[0]:
        column = some[0].index(cut)
        rest = max(NARROWEST, width - 4 - _width(header, rows, [at for at in kept if header[at] != cut], cut) + 1)
        for row in some:
            row[column] = row[column] if len(row[column]) <= rest else f"{row[column][: rest - 3]}..."
    return markdown(some[0], some[1:])


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
