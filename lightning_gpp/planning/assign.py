"""From module paths to stages: which operators each stage computes, what flows between stages, and the plan that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Plan, Stage, topological

Assignment = dict[str, tuple[int, ...]]
"""For every operator the stages that compute it. Cheap glue that several stages read is computed in each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """A stage before its edges and figures are known."""

    name: str
    modules: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batch_size: int


def assign(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> Assignment:
    """Give every operator to the stage that lists the longest prefix of its module path; glue goes to its consumers.

    Raises:
        PlanError: a module is listed twice.
    """
    owners = _owners(stage_modules)
    assignment: Assignment = {}
    clusters: dict[str, tuple[int, ...]] = {}
    for operator in reversed(list(graph)):
        stages = clusters.get(operator.cluster) or _stages_of(operator, graph, owners, assignment)
        if operator.cluster and stages:
            clusters[operator.cluster] = stages
        assignment[operator.name] = stages
    return assignment


def _owners(stage_modules: Sequence[Sequence[str]]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for index, modules in enumerate(stage_modules):
        for module in modules:
            if module in owners:
                raise PlanError(f"Module {module!r} is listed by two stages, {owners[module]} and {index}.")
            owners[module] = index
    return owners


def owner_of(module: str, owners: dict[str, int]) -> int | None:
    """The value of the longest prefix (in whole path parts) of `module` among `owners`."""
    while module not in owners:
        if not module or module == STEP:
            return None
        module = module.rpartition(".")[0]
    return owners[module]


def _stages_of(
    operator: Operator, graph: OperatorGraph, owners: dict[str, int], assignment: Assignment
) -> tuple[int, ...]:
    if operator.target == "input":
        return (SOURCE,)
    owner = owner_of(operator.module, owners)
    if owner is not None:
        return (owner,)
    consumers = sorted({stage for name in graph.nx.successors(operator.name) for stage in assignment[name]})
    if len(consumers) <= 1 or _may_repeat(operator):
        return tuple(consumers)
    return (consumers[0],)


def _may_repeat(operator: Operator) -> bool:
    return not (operator.parameters or operator.buffers or operator.random or operator.cluster)


def crossing(graph: OperatorGraph, assignment: Assignment) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """For every edge of the stage graph the values `(operator, output)` that flow, in recorded order."""
    values: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for operator in graph:
        for _, target, outputs in graph.nx.out_edges(operator.name, data="outputs"):
            for stage in assignment[target]:
                if stage in assignment[operator.name]:
                    continue
                flow = values.setdefault((assignment[operator.name][0], stage), [])
                flow.extend((operator.name, output) for output in outputs if (operator.name, output) not in flow)
    return values


def make_plan(
    graph: OperatorGraph, drafts: Sequence[StageDraft], *, batch_size: int, schedule: str = "1f1b", model: str = ""
) -> Plan:
    """Complete drafts to a plan: edges, bytes and figures from the graph, stages in topological order.

    Raises:
        PlanError: the stages form a cycle, or the drafts contradict themselves.
    """
    assignment = assign(graph, [draft.modules for draft in drafts])
    pairs = [pair for pair in crossing(graph, assignment) if pair[0] != SOURCE]
    order = _order(drafts, pairs)
    drafts = [drafts[index] for index in order]
    assignment = assign(graph, [draft.modules for draft in drafts])
    edges = tuple(_edge(graph, pair, values) for pair, values in sorted(crossing(graph, assignment).items()))
    figures = _figures(graph, assignment, len(drafts))
    stages = tuple(
        Stage(
            name=draft.name,
            modules=draft.modules,
            devices=draft.devices,
            micro_batch_size=draft.micro_batch_size,
            figures=figures[index],
        )
        for index, draft in enumerate(drafts)
    )
    return Plan(stages=stages, edges=edges, batch_size=batch_size, schedule=schedule, model=model)


def _order(drafts: Sequence[StageDraft], pairs: list[tuple[int, int]]) -> list[int]:
    try:
        return topological(pairs, len(drafts))
    except nx.NetworkXUnfeasible:
        cycle = [src for src, _ in nx.find_cycle(nx.DiGraph(pairs))]
        names = " -> ".join(drafts[index].name for index in [*cycle, cycle[0]])
        raise PlanError(
            f"The stages form a cycle: {names}. Each needs a result of the next, so none can start. "
            "Merge these stages, or move modules between them (strategy.stages)."
        ) from None


def _edge(graph: OperatorGraph, pair: tuple[int, int], values: list[tuple[str, int]]) -> Edge:
    specs = [graph[name].outputs[output] for name, output in values]
    fixed = sum(spec.bytes(0) for spec in specs)
    return Edge(
        src=pair[0],
        dst=pair[1],
        bytes=Affine(sum(spec.bytes(1) for spec in specs) - fixed, fixed),
        differentiable=any(spec.requires_grad for spec in specs),
        sliceable=all(spec.sliceable or not spec.varies for spec in specs),
    )


def _figures(graph: OperatorGraph, assignment: Assignment, num_stages: int) -> list[Figures]:
    flops = [Affine() for _ in range(num_stages)]
    saved = [Affine() for _ in range(num_stages)]
    names: list[set[str]] = [set() for _ in range(num_stages)]
    for operator in graph:
        for stage in assignment[operator.name]:
            if stage != SOURCE:
                flops[stage] += operator.flops
                saved[stage] += operator.saved_bytes
                names[stage].update(operator.parameters)
    return [
        Figures(
            flops=flops[stage],
            activation_bytes=saved[stage],
            num_parameters=sum(graph.parameter_sizes[name] for name in names[stage]),
            parameter_bytes=sum(graph.parameter_bytes[name] for name in names[stage]),
        )
        for stage in range(num_stages)
    ]
