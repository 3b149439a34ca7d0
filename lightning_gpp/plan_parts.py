"""The parts of a plan: its stages, the edges between them, and their figures; and the checks of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.graph.operator_graph import Affine

STEP: Final = "@step"
"""The module name of the user's step: loss, metrics, logging. The stage that lists it is the sink."""

SOURCE: Final = -1
"""The stage index of the source: the user's step up to the inputs of the network, on the sink's devices."""

WHOLE: Final = 1 << 30
"""A micro-batch size that no mini-batch exceeds, for steps that run once per mini-batch."""


SHARDINGS: Final = ("none", "zero1", "fsdp")
"""Shardings: replicas of a stage split nothing, the optimizer's state (ZeRO-1), or parameters and gradients, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that flow from one stage to another.

    Args:
        src: index of the stage that sends, or SOURCE.
        dst: index of the stage that receives.
        bytes: bytes per micro-batch, affine in its samples.
        differentiable: gradients flow back.
        artificial: no tensor flows, the edge only forces the order (the chain baseline).
        sliceable: intervals of samples can be cut out of every tensor, so both ends may have different micro-batches.
        seconds: duration of the transfer of a micro-batch; 0 if unknown.
    """

    src: int
    dst: int
    bytes: Affine = Affine()
    differentiable: bool = True
    artificial: bool = False
    sliceable: bool = True
    seconds: Affine = Affine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The costs of a stage per micro-batch, and its parameters. Seconds are 0 if unknown; schedules may use them.

    Args:
        flops: FLOPs of a forward.
        activation_bytes: bytes kept on the device from the forward to the backward.
        offloaded_bytes: bytes kept in host memory in between, if the stage offloads.
        working_bytes: additional bytes while the stage, or a block of it, is recomputed.
        pending_bytes: the part of these that is kept until the weight gradients, if they are computed separately.
        forward_seconds: seconds of the forward.
        input_seconds: seconds of the input gradients, recomputed blocks included.
        weight_seconds: seconds of the weight gradients.
        num_parameters: number of parameters.
        parameter_bytes: their bytes.
    """

    flops: Affine = Affine()
    activation_bytes: Affine = Affine()
    offloaded_bytes: Affine = Affine()
    working_bytes: Affine = Affine()
    pending_bytes: Affine = Affine()
    forward_seconds: Affine = Affine()
    input_seconds: Affine = Affine()
    weight_seconds: Affine = Affine()
    num_parameters: int = 0
    parameter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A convex part of the model. Every device in `devices` has a replica, which takes its share of each micro-batch.

    Args:
        name: unique in the plan.
        modules: paths of the modules.
        devices: devices of the replicas, numbered inside one pipeline replica.
        micro_batch_size: the most samples of a micro-batch.
        round_robin: replicas take micro-batches in turn instead of a share of each: number i goes to replica
            i modulo their number.
        recompute: what the stage computes again for the backward instead of keeping it. True: everything but the inputs
            of a micro-batch, in an action of its own before the backward; not for the stage that lists STEP. Paths of
            modules: each of these blocks keeps only its inputs, and runs again when the backward reaches it.
        offload: what the stage's forwards keep for the backwards, but for its inputs, lies in host memory in between.
        slack: micro-batches that the stage holds in flight beyond those that the rule of `1f1b` needs, so that late
            messages do not delay it; its predecessors hold as many more. Other schedules ignore it.
        tokens: interval `[start, stop)` of the sequence if the stage is a slice (`lightning_gpp.slices`); None: all.
        figures: its costs; those of one process.
    """

    name: str
    modules: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batch_size: int
    round_robin: bool = False
    recompute: bool | tuple[str, ...] = False
    offload: bool = False
    slack: int = 0
    tokens: tuple[int, int] | None = None
    figures: Figures = Figures()

    @property
    def reruns(self) -> bool:
        """True if the whole stage runs its forward again, as an action of its own."""
        return self.recompute is True

    @property
    def recomputed_blocks(self) -> tuple[str, ...]:
        """The modules that run again inside the backward."""
        return () if isinstance(self.recompute, bool) else self.recompute


def even_parts(total: int, size: int) -> list[tuple[int, int]]:
    """The fewest intervals of at most `size` samples that tile `total`, with sizes that differ by one at most.

    A rest of one sample would be no micro-batch for BatchNorm, and one of few samples uses a GPU badly.
    """
    number = -(-total // size)
    return [(-(-part * total // number), -(-(part + 1) * total // number)) for part in range(number)]


def share_of(num_samples: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """The samples `[start, stop)` of a micro-batch that one of the replicas of a stage computes."""
    return replica * num_samples // num_replicas, (replica + 1) * num_samples // num_replicas


# -- checks of the parts against each other ---------------------------------------------------------------------------


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
            "count twice. List modules to recompute."
        )
    if stage.offload and stage.reruns:
        raise PlanError(
            f"Stage {stage.name!r} has offload=true and recompute=true: it would keep only its inputs, which are not "
            "offloaded. Leave recompute out."
        )
    if stage.offload and stage.tokens is not None:
        raise PlanError(
            f"Stage {stage.name!r} has offload=true, but is a slice, which hands on tensors that stay on the device. "
            "Leave out offload."
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
        raise PlanError(f"The stage graph has a cycle: {names}. Merge these stages.")
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


def stage_graph(num_stages: int, edges: Iterable[Edge]) -> nx.DiGraph:
    """The stage graph without the data source; nodes are stage indices."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num_stages))
    graph.add_edges_from((edge.src, edge.dst) for edge in edges if edge.src != SOURCE)
    return graph
