"""Checks of the parts of a plan against each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.plan_parts import SOURCE, STEP, Edge, Figures, Stage


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise PlanError if stages contradict themselves or each other."""
    if not stages:
        raise PlanError("The plan has no stages.")
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise PlanError(f"Stage names must differ, got {names}.")
    steps = [stage.name for stage in stages if STEP in stage.modules]
    if len(steps) != 1:
        raise PlanError(
            f"Exactly one stage must list {STEP!r} (the user's step) in its modules, but these do: {steps}."
        )
    for stage in stages:
        if stage.micro_batch_size < 1:
            raise PlanError(f"Stage {stage.name!r}: micro_batch_size is {stage.micro_batch_size}; it must be >= 1.")
        if not stage.devices or len(set(stage.devices)) < len(stage.devices):
            raise PlanError(f"Stage {stage.name!r}: devices must be a non-empty list without repeats: {stage.devices}.")
        _check_flags(stage)


def _check_flags(stage: Stage) -> None:
    if stage.slack < 0:
        raise PlanError(f"Stage {stage.name!r}: slack is {stage.slack!r}; it must be a whole number, 0 or more.")
    if stage.reruns and STEP in stage.modules:
        raise PlanError(
            f"Stage {stage.name!r} has recompute=true, but it runs the user's step ({STEP!r}), which would log and "
            f"count twice. List modules to recompute, or give {STEP!r} a stage of its own, after the modules of this "
            "one, or leave recompute out."
        )
    if stage.offload and stage.reruns:
        raise PlanError(
            f"Stage {stage.name!r} has offload=true and recompute=true: it would keep only its inputs, which are not "
            "offloaded. Leave one of them out, or list modules to recompute."
        )
    if stage.offload and stage.tokens is not None:
        raise PlanError(
            f"Stage {stage.name!r} has offload=true, but is a slice, which hands on tensors that stay on the device. "
            "Leave out offload, or strategy.slices."
        )


def check_slices(stages: Sequence[Stage], edges: Sequence[Edge]) -> None:
    """Raise PlanError unless slices of a stage follow each other, differ only in their tokens, and fit together."""
    latest: dict[tuple[str, ...], Stage] = {}
    for stage in stages:
        if stage.tokens is None:
            continue
        before, (start, stop) = latest.get(stage.modules), stage.tokens
        same = before is None or replace(before, name="", tokens=None, figures=Figures()) == replace(
            stage, name="", tokens=None, figures=Figures()
        )
        expected = before.tokens[1] if before is not None and before.tokens is not None else 0
        if STEP in stage.modules or not same or start != expected or stop <= start:
            raise PlanError(
                f"Stage {stage.name!r} is to compute tokens {list(stage.tokens)}. Slices of a stage must follow each "
                f"other from token 0, next is {expected}, with the same devices and micro_batch_size; the stage of the "
                f"user's step ({STEP!r}) has none."
            )
        latest[stage.modules] = stage
    _check_same_slices(stages, edges)


def _check_same_slices(stages: Sequence[Stage], edges: Sequence[Edge]) -> None:
    """Check that all stages are cut at the same tokens, and that edges join slices of the same tokens."""
    cuts: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for stage in stages:
        if stage.tokens is not None:
            cuts.setdefault(stage.modules, []).append(stage.tokens)
    if len({tuple(found) for found in cuts.values()}) > 1:
        raise PlanError(f"All stages that are cut must be cut at the same tokens; these differ: {list(cuts.values())}.")
    for edge in (edge for edge in edges if not edge.artificial):
        ends = [stages[index] for index in (edge.src, edge.dst) if index != SOURCE]
        tokens = {stage.tokens for stage in ends if stage.tokens is not None}
        if len(tokens) > 1 and ends[0].modules != ends[1].modules:
            raise PlanError(f"Edge {edge.src} -> {edge.dst} joins slices of different tokens: {sorted(tokens)}.")


def check_edges(stages: Sequence[Stage], edges: Sequence[Edge]) -> None:
    """Raise PlanError if edges lead nowhere, or back."""
    for edge in edges:
        if not (SOURCE <= edge.src < len(stages) and 0 <= edge.dst < len(stages)):
            raise PlanError(f"Edge {edge.src} -> {edge.dst} names a stage that the plan does not have.")
    graph = stage_graph(len(stages), edges)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = nx.find_cycle(graph)
        names = " -> ".join(stages[src].name for src, _ in cycle) + f" -> {stages[cycle[0][0]].name}"
        raise PlanError(f"The stage graph has a cycle: {names}. Merge these stages or move modules between them.")
    if any(src >= dst for src, dst in graph.edges):
        raise PlanError("Stages must be listed in topological order: every edge from a lower to a higher index.")


def check_devices(stages: Sequence[Stage], unused: Sequence[int]) -> None:
    """Raise PlanError if devices are missing, or are said to be unused and have stages."""
    used = {device for stage in stages for device in stage.devices}
    if used & set(unused):
        raise PlanError(f"unused names devices {sorted(used & set(unused))}, which have stages.")
    present = used | set(unused)
    if present != set(range(len(present))):
        raise PlanError(f"Devices must be numbered 0..n-1 without gaps; the stages use {sorted(used)}.")


def check_members(stages: Sequence[Stage]) -> None:
    """Raise PlanError if the numbers of processes of stages do not go together."""
    known: dict[int, Stage] = {}
    most = max((stage.tensor_parallel_size for stage in stages), default=1)
    for stage in stages:
        size = stage.tensor_parallel_size
        if size < 1 or most % size:
            raise PlanError(
                f"Stage {stage.name!r}: tensor_parallel_size is {size}; it must be at least 1, and divide the largest "
                f"of the plan, {most}."
            )
        for device in stage.devices:
            other = known.setdefault(device, stage)
            if other.tensor_parallel_size != size:
                raise PlanError(
                    f"Stages {other.name!r} and {stage.name!r} share device {device}, but have "
                    f"tensor_parallel_size={other.tensor_parallel_size} and {size}. Give them the same number, or "
                    "other devices."
                )


def stage_graph(num_stages: int, edges: Iterable[Edge]) -> nx.DiGraph:
    """The stage graph without the data source; nodes are stage indices."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num_stages))
    graph.add_edges_from((edge.src, edge.dst) for edge in edges if edge.src != SOURCE)
    return graph
