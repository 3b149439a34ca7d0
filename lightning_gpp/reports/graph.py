"""The stage graph of a plan, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from lightning_gpp.plan import SOURCE, Edge, Plan, Stage
from lightning_gpp.reports import svg
from lightning_gpp.reports.units import count, size

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 240, 56, 70, 22, 20


def levels(plan: Plan) -> list[list[int]]:
    """Stages by the length of their longest path from the source; those of one level do not wait for each other."""
    return [sorted(level) for level in nx.topological_generations(plan.graph())]


def graph_text(plan: Plan) -> str:
    """One line per level of the stage graph, one arrow per edge: stages of one level can compute at the same time."""
    lines = []
    for number, level in enumerate(levels(plan)):
        lines.append(f"level {number}: " + " | ".join(_title(plan, stage) for stage in level))
        lines += [f"    {_arrow(plan, edge)}" for edge in plan.edges if edge.dst in level and edge.src != SOURCE]
    return "\n".join(lines)


def _title(plan: Plan, stage: int) -> str:
    return f"{stage} {plan.stages[stage].name} ({_where(plan.stages[stage])})"


def _arrow(plan: Plan, edge: Edge) -> str:
    return f"{plan.stages[edge.src].name} -> {plan.stages[edge.dst].name}: {_load(plan, edge)}"


def _load(plan: Plan, edge: Edge) -> str:
    if edge.artificial:
        return "order only"
    return size(edge.bytes.at(plan.stages[edge.dst].micro_batch_size)) + (" both ways" if edge.differentiable else "")


def graph_svg(plan: Plan) -> str:
    """The stage graph from left to right. A box shows name, devices, replicas, recomputation, parameters and FLOPs."""
    columns = levels(plan)
    tallest = max(map(len, columns))
    height = 2 * MARGIN + tallest * BOX_HEIGHT + (tallest - 1) * GAP_Y
    width = 2 * MARGIN + len(columns) * BOX_WIDTH + (len(columns) - 1) * GAP_X
    corners = {
        stage: (MARGIN + column * (BOX_WIDTH + GAP_X), _top(row, len(level), height))
        for column, level in enumerate(columns)
        for row, stage in enumerate(level)
    }
    boxes = [element for stage, corner in corners.items() for element in _box(plan, stage, *corner)]
    arrows = [_edge(corners, edge) for edge in plan.edges if edge.src != SOURCE]
    return svg.document(width, height, [svg.ARROW_HEAD, *arrows, *boxes])


def _top(row: int, num_rows: int, height: float) -> float:
    used = num_rows * BOX_HEIGHT + (num_rows - 1) * GAP_Y
    return (height - used) / 2 + row * (BOX_HEIGHT + GAP_Y)


def _box(plan: Plan, stage: int, x: float, y: float) -> list[str]:
    entry = plan.stages[stage]
    flops = count(entry.figures.flops.at(entry.micro_batch_size))
    lines = (
        _clipped(f"{stage} {entry.name}"),
        _clipped(_where(entry)),
        f"{count(entry.figures.num_parameters)} parameters, {flops}FLOP",
    )
    color = svg.COLORS[entry.devices[0] % len(svg.COLORS)]
    box = svg.rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, color, title=", ".join(entry.modules), opacity=0.3)
    return [box, *(svg.text(x + 8, y + 17 + 16 * row, line) for row, line in enumerate(lines))]


def _where(stage: Stage) -> str:
    """Devices as ranges, the number of replicas if there are several, and whether the stage is recomputed."""
    shared = f", {len(stage.devices)} replicas" if len(stage.devices) > 1 else ""
    return f"device {_ranges(stage.devices)}{shared}{', recomputed' if stage.recompute else ''}"


def _ranges(devices: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def _clipped(name: str, most: int = 36) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _edge(corners: Mapping[int, tuple[float, float]], edge: Edge) -> str:
    (x1, y1), (x2, y2) = corners[edge.src], corners[edge.dst]
    middle = BOX_HEIGHT / 2
    return svg.arrow((x1 + BOX_WIDTH, y1 + middle), (x2, y2 + middle), dashed=edge.artificial)
