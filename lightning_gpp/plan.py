"""The plan: stages with their modules, devices and micro-batches, and the edges between them, as plain data.

Device numbers are positions inside one pipeline replica: a plan for 4 devices runs on 8 ranks as two pipeline replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import networkx as nx
import yaml

from lightning_gpp.errors import ConfigError, PlanError
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
        dynamic: shapes are known only at run time.
        sliceable: intervals of samples can be cut out of every tensor, so both ends may have different micro-batches.
        seconds: duration of the transfer of a micro-batch; 0 if unknown.
    """

    src: int
    dst: int
    bytes: Affine = Affine()
    differentiable: bool = True
    artificial: bool = False
    dynamic: bool = False
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
        micro_batch_size: samples of a micro-batch.
        round_robin: replicas take micro-batches in turn instead of a share of each: number i goes to replica
            i modulo their number.
        recompute: what the stage computes again for the backward instead of keeping it. True: everything but the inputs
            of a micro-batch, in an action of its own before the backward; not for the stage that lists STEP. Paths of
            modules: each of these blocks keeps only its inputs, and runs again when the backward reaches it.
        offload: what the stage's forwards keep for the backwards, but for its inputs, lies in host memory in between.
        slack: micro-batches that the stage holds in flight beyond those that the rule of `1f1b` needs, so that late
            messages do not delay it; its predecessors hold as many more. Other schedules ignore it.
        tokens: interval `[start, stop)` of the sequence if the stage is a slice (`lightning_gpp.slices`); None: all.
        tensor_parallel_size: number of processes of each of its devices, its members, which share the stage's work.
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
    tensor_parallel_size: int = 1
    figures: Figures = Figures()

    @property
    def reruns(self) -> bool:
        """True if the whole stage runs its forward again, as an action of its own."""
        return self.recompute is True

    @property
    def recomputed_blocks(self) -> tuple[str, ...]:
        """The modules that run again inside the backward."""
        return () if isinstance(self.recompute, bool) else self.recompute


def share_of(num_samples: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """The samples `[start, stop)` of a micro-batch that one of the replicas of a stage computes."""
    return replica * num_samples // num_replicas, (replica + 1) * num_samples // num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages, the edges between them and the name of the schedule.

    Args:
        stages: in topological order.
        edges: the stage graph, SOURCE edges included.
        batch_size: samples of the mini-batch of one pipeline replica that the plan was made for.
        schedule: name of the schedule.
        model: fingerprint of the captured model; empty if unknown.
        sharding: one of SHARDINGS, what the replicas of a stage split in addition to samples.
        memory_bytes: limit of every device for activations, which some schedules respect; empty if unknown.
        period: samples after which micro-batches start anew, where several mini-batches are written out in a row; 0 if
            there is only one.
        unused: devices that compute nothing, because the others are faster without them.
        sequence_dim: the dimension of tensors between stages that counts tokens, if stages are slices.
        notes: remarks by name, for people.

    Raises:
        PlanError: the plan contradicts itself.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    batch_size: int
    schedule: str = "1f1b"
    model: str = ""
    sharding: str = "none"
    memory_bytes: tuple[float, ...] = ()
    period: int = 0
    unused: tuple[int, ...] = ()
    sequence_dim: int = 1
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_sliced(self) -> bool:
        """True if any stage is a slice."""
        return any(stage.tokens is not None for stage in self.stages)

    @property
    def num_devices(self) -> int:
        return 1 + max(device for devices in (self.unused, *(s.devices for s in self.stages)) for device in devices)

    @property
    def members(self) -> tuple[int, ...]:
        """Number of processes of each device; an unused one has as many as the smallest."""
        found = {device: stage.tensor_parallel_size for stage in self.stages for device in stage.devices}
        least = min(found.values())
        return tuple(found.get(device, least) for device in range(self.num_devices))

    def with_members(self, number: int) -> Plan:
        """The plan with this number of processes on every device, unless the plan names numbers itself.

        Raises:
            ConfigError: it names others.
        """
        named = {stage.tensor_parallel_size for stage in self.stages}
        if number == 1 or named == {number}:
            return self
        if named != {1}:
            others = " and ".join(map(str, sorted(named)))
            raise ConfigError(
                f"strategy.tensor_parallel_size={number}, but the plan (strategy.plan) has {others} processes per "
                "device. Leave out strategy.tensor_parallel_size."
            )
        return replace(self, stages=tuple(replace(stage, tensor_parallel_size=number) for stage in self.stages))

    @property
    def num_processes(self) -> int:
        """Number of processes of one pipeline replica."""
        return sum(self.members)

    @property
    def step_stage(self) -> int:
        """Index of the stage that runs the user's step: the sink."""
        return next(i for i, stage in enumerate(self.stages) if STEP in stage.modules)

    def graph(self) -> nx.DiGraph:
        """The stage graph without the data source; nodes are stage indices."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.stages)))
        graph.add_edges_from((edge.src, edge.dst) for edge in self.edges if edge.src != SOURCE)
        return graph

    def depths(self) -> dict[int, int]:
        """Length of the longest path from every stage to a sink, in stages, itself included."""
        graph = self.graph()
        depths: dict[int, int] = {}
        for stage in reversed(list(nx.topological_sort(graph))):
            depths[stage] = 1 + max((depths[successor] for successor in graph.successors(stage)), default=0)
        return depths

    @property
    def depth(self) -> int:
        return max(self.depths().values())

    def intervals(self, stage: int, batch_size: int | None = None) -> list[tuple[int, int]]:
        """Samples `[start, stop)` of each micro-batch of a stage; the last may be smaller. SOURCE: as the sink."""
        total = self.batch_size if batch_size is None else batch_size
        size = self.stages[self.step_stage if stage == SOURCE else stage].micro_batch_size
        ends = [(begin, min(begin + (self.period or total), total)) for begin in range(0, total, self.period or total)]
        return [(start, min(start + size, stop)) for begin, stop in ends for start in range(begin, stop, size)]

    def share(self, stage: int, device: int, interval: tuple[int, int]) -> tuple[int, int]:
        """The samples of a micro-batch that the replica of `stage` on `device` computes; may be empty."""
        devices = self.devices_of(stage)
        start, stop = interval
        replica, count = devices.index(device), len(devices)
        entry = self.stages[self.step_stage if stage == SOURCE else stage]
        if entry.round_robin:
            mine = start // entry.micro_batch_size % count == replica
            return (start, stop) if mine else (start, start)
        first, last = share_of(stop - start, replica, count)
        return start + first, start + last

    def micro_batches(self, stage: int, device: int, batch_size: int | None = None) -> list[int]:
        """Numbers of the micro-batches that the replica of `stage` on `device` computes, or a share of them."""
        numbers = range(len(self.intervals(stage, batch_size)))
        if not self.stages[stage].round_robin:
            return list(numbers)
        devices = self.devices_of(stage)
        return list(numbers[devices.index(device) :: len(devices)])

    def devices_of(self, stage: int) -> tuple[int, ...]:
        return self.stages[self.step_stage if stage == SOURCE else stage].devices

    def stages_on(self, device: int) -> tuple[int, ...]:
        return tuple(i for i, stage in enumerate(self.stages) if device in stage.devices)

    def chained(self) -> Plan:
        """The same stages as a chain, made by artificial edges between consecutive stages: the sequential baseline."""
        present = {(edge.src, edge.dst) for edge in self.edges}
        pairs = [(i, i + 1) for i in range(len(self.stages) - 1) if (i, i + 1) not in present]
        extra = tuple(Edge(src=src, dst=dst, artificial=True) for src, dst in pairs)
        return replace(self, edges=self.edges + extra)

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML, for people to read and edit."""
        content = {"version": VERSION, **_plain(asdict(self))}
        del content["period"]  # of programs, not of plans
        for stage in content["stages"]:
            if stage["tensor_parallel_size"] == 1:
                del stage["tensor_parallel_size"]
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote (YAML, of which JSON is a subset).

        Raises:
            PlanError: the file is missing, or is not a plan of a version that this release can read.
        """
        from lightning_gpp.files import read_yaml  # the reading of files loads a library that planning does not need
        from lightning_gpp.validation import validated

        place = f"{path} (strategy.plan)"
        content = _without_version(place, read_yaml(path, error=PlanError, place=place))
        plan = validated(cls, content, place=place, error=PlanError, remedy=_REMEDY)
        _check_figures(plan, place)
        return plan


VERSION: Final = 1
"""The version of the plan files that are written; files without one are of version 1."""

_REMEDY: Final = "Write plans with `gpp-plan ... output=plan.yaml`, or with Plan.save()."


def _without_version(place: str, content: Any) -> Any:
    if not isinstance(content, dict) or "version" not in content:
        return content
    version = content["version"]
    if isinstance(version, int) and version > VERSION:
        raise PlanError(
            f"{place}: version is {version}, and this release of lightning-gpp reads plans up to version {VERSION}. "
            "Update lightning-gpp, or make the plan again: gpp-plan ... output=plan.yaml."
        )
    if version is not VERSION:
        raise PlanError(f"{place}: version is {version!r}; it must be {VERSION}, or left out.")
    return {key: value for key, value in content.items() if key != "version"}


def _check_figures(plan: Plan, place: str) -> None:
    """Refuse costs below 0. The fixed part of an affine quantity may be: `2b - 1`."""
    for index, stage in enumerate(plan.stages):
        for name, value in asdict(stage.figures).items():
            least = value["per_sample"] if isinstance(value, dict) else value
            if least < 0:
                raise PlanError(f"{place}: stages[{index}].figures.{name} is {value}; it must not be below 0.")


def shared_parameter(name: str, stages: Sequence[str]) -> PlanError:
    """The error for a parameter that several stages use, so that it cannot be sharded."""
    return PlanError(
        f"strategy.sharding=fsdp: parameter {name!r} is used by the stages {' and '.join(stages)} and cannot be "
        "sharded over the replicas of one. Put the modules that share it into one stage (strategy.stages), or use "
        "strategy.sharding=zero1."
    )


def check(plan: Plan) -> None:
    """Raise PlanError if the plan contradicts itself."""
    _check_stages(plan)
    _check_edges(plan)
    _check_devices(plan)
    _check_members(plan)
    _check_sharding(plan)
    _check_slices(plan)


def _check_stages(plan: Plan) -> None:
    if not plan.stages:
        raise PlanError("The plan has no stages.")
    if plan.batch_size < 1:
        raise PlanError(f"The plan's batch_size is {plan.batch_size}; it must be at least 1 sample.")
    names = [stage.name for stage in plan.stages]
    if len(set(names)) < len(names):
        raise PlanError(f"Stage names must differ, got {names}.")
    steps = [stage.name for stage in plan.stages if STEP in stage.modules]
    if len(steps) != 1:
        raise PlanError(
            f"Exactly one stage must list {STEP!r} (the user's step) in its modules, but these do: {steps}."
        )
    for stage in plan.stages:
        if stage.micro_batch_size < 1:
            raise PlanError(f"Stage {stage.name!r}: micro_batch_size is {stage.micro_batch_size}; it must be >= 1.")
        if not stage.devices or len(set(stage.devices)) < len(stage.devices):
            raise PlanError(f"Stage {stage.name!r}: devices must be a non-empty list without repeats: {stage.devices}.")
        _check_flags(stage)


def _check_flags(stage: Stage) -> None:
    if not isinstance(stage.slack, int) or stage.slack < 0:
        raise PlanError(f"Stage {stage.name!r}: slack is {stage.slack!r}; it must be a whole number, 0 or more.")
    if not isinstance(stage.round_robin, bool):
        raise PlanError(f"Stage {stage.name!r}: round_robin is {stage.round_robin!r}; it must be true or false.")
    _check_recompute(stage)
    _check_offload(stage)


def _check_offload(stage: Stage) -> None:
    if not isinstance(stage.offload, bool):
        raise PlanError(f"Stage {stage.name!r}: offload is {stage.offload!r}; it must be true or false.")
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


def _check_recompute(stage: Stage) -> None:
    paths = isinstance(stage.recompute, tuple) and all(isinstance(path, str) for path in stage.recompute)
    if not isinstance(stage.recompute, bool) and not paths:
        raise PlanError(
            f"Stage {stage.name!r}: recompute is {stage.recompute!r}; it must be true or false, or a list of modules."
        )
    if stage.reruns and STEP in stage.modules:
        raise PlanError(
            f"Stage {stage.name!r} has recompute=true, but it runs the user's step ({STEP!r}), which would log and "
            f"count twice. List modules to recompute, or give {STEP!r} a stage of its own, after the modules of this "
            "one, or leave recompute out."
        )


def _check_sharding(plan: Plan) -> None:
    if plan.sharding not in SHARDINGS:
        raise PlanError(f"The plan's sharding is {plan.sharding!r}; it must be one of {', '.join(SHARDINGS)}.")
    if plan.memory_bytes and len(plan.memory_bytes) != plan.num_devices:
        raise PlanError(f"memory_bytes has {len(plan.memory_bytes)} entries; the plan has {plan.num_devices} devices.")


def _check_slices(plan: Plan) -> None:
    """Check that slices of a stage follow each other and differ only in their tokens."""
    latest: dict[tuple[str, ...], Stage] = {}
    for stage in plan.stages:
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
    _check_same_slices(plan)


def _check_same_slices(plan: Plan) -> None:
    """Check that all stages are cut at the same tokens, and that edges join slices of the same tokens."""
    cuts: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for stage in plan.stages:
        if stage.tokens is not None:
            cuts.setdefault(stage.modules, []).append(stage.tokens)
    if len({tuple(found) for found in cuts.values()}) > 1:
        raise PlanError(f"All stages that are cut must be cut at the same tokens; these differ: {list(cuts.values())}.")
    for edge in (edge for edge in plan.edges if not edge.artificial):
        ends = [plan.stages[index] for index in (edge.src, edge.dst) if index != SOURCE]
        tokens = {stage.tokens for stage in ends if stage.tokens is not None}
        if len(tokens) > 1 and ends[0].modules != ends[1].modules:
            raise PlanError(f"Edge {edge.src} -> {edge.dst} joins slices of different tokens: {sorted(tokens)}.")


def _check_edges(plan: Plan) -> None:
    for edge in plan.edges:
        if not (SOURCE <= edge.src < len(plan.stages) and 0 <= edge.dst < len(plan.stages)):
            raise PlanError(f"Edge {edge.src} -> {edge.dst} names a stage that the plan does not have.")
    graph = plan.graph()
    if not nx.is_directed_acyclic_graph(graph):
        cycle = nx.find_cycle(graph)
        names = " -> ".join(plan.stages[src].name for src, _ in cycle) + f" -> {plan.stages[cycle[0][0]].name}"
        raise PlanError(f"The stage graph has a cycle: {names}. Merge these stages or move modules between them.")
    if any(src >= dst for src, dst in graph.edges):
        raise PlanError("Stages must be listed in topological order: every edge from a lower to a higher index.")


def _check_devices(plan: Plan) -> None:
    used = {device for stage in plan.stages for device in stage.devices}
    if used & set(plan.unused):
        raise PlanError(f"unused names devices {sorted(used & set(plan.unused))}, which have stages.")
    present = used | set(plan.unused)
    if present != set(range(len(present))):
        raise PlanError(f"Devices must be numbered 0..n-1 without gaps; the stages use {sorted(used)}.")


def _check_members(plan: Plan) -> None:
    known: dict[int, Stage] = {}
    most = max((stage.tensor_parallel_size for stage in plan.stages), default=1)
    for stage in plan.stages:
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def topological(pairs: Iterable[tuple[int, int]], num_stages: int) -> list[int]:
    """A topological order of stage indices that keeps the given order where the edges allow it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num_stages))
    graph.add_edges_from(pairs)
    return list(nx.lexicographical_topological_sort(graph))
