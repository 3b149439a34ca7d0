"""The plan: stages with their modules, devices and micro-batches, and the edges between them, as plain data.

Device numbers are positions inside one pipeline replica: a plan for 4 devices runs on 8 ranks as two pipeline replicas.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, Final

import networkx as nx
import yaml

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.plan_parts import (
    SHARDINGS,
    SOURCE,
    STEP,
    WHOLE,
    Edge,
    Figures,
    Stage,
    check_devices,
    check_edges,
    check_slices,
    check_stages,
    even_parts,
    share_of,
    stage_graph,
)

__all__ = [
    "SHARDINGS",
    "SOURCE",
    "STEP",
    "WHOLE",
    "Edge",
    "Figures",
    "Plan",
    "Stage",
    "VERSION",
    "share_of",
    "shared_parameter",
    "topological",
]


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
        tensor_parallel_size: number of processes of every device, its members, which share the work of its stages. All
            figures are those of one process.
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
    tensor_parallel_size: int = 1
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_stages(self.stages)
        check_edges(self.stages, self.edges)
        check_devices(self.stages, self.unused)
        check_slices(self.stages, self.edges)
        self._check_rest()

    def _check_rest(self) -> None:
        if self.batch_size < 1:
            raise PlanError(f"The plan's batch_size is {self.batch_size}; it must be at least 1 sample.")
        if self.tensor_parallel_size < 1:
            raise PlanError(f"The plan's tensor_parallel_size is {self.tensor_parallel_size}; it must be at least 1.")
        if self.sharding not in SHARDINGS:
            raise PlanError(f"The plan's sharding is {self.sharding!r}; it must be one of {', '.join(SHARDINGS)}.")
        if self.memory_bytes and len(self.memory_bytes) != self.num_devices:
            raise PlanError(
                f"memory_bytes has {len(self.memory_bytes)} entries, but the devices of the stages are 0 to "
                f"{self.num_devices - 1}. Give it one entry for each."
            )

    @property
    def is_sliced(self) -> bool:
        """True if any stage is a slice."""
        return any(stage.tokens is not None for stage in self.stages)

    @property
    def num_devices(self) -> int:
        return 1 + max(device for devices in (self.unused, *(s.devices for s in self.stages)) for device in devices)

    def with_members(self, number: int) -> Plan:
        """The plan with this number of processes on every device, unless the plan names one itself.

        Raises:
            ConfigError: it names another.
        """
        named = self.tensor_parallel_size
        if named not in (1, number) and number != 1:
            raise ConfigError(
                f"strategy.tensor_parallel_size={number}, but the plan (strategy.plan) has {named} processes per "
                "device. Leave out strategy.tensor_parallel_size."
            )
        return replace(self, tensor_parallel_size=max(named, number))

    @property
    def num_processes(self) -> int:
        """Number of processes of one pipeline replica."""
        return self.num_devices * self.tensor_parallel_size

    @property
    def step_stage(self) -> int:
        """Index of the stage that runs the user's step: the sink."""
        return next(i for i, stage in enumerate(self.stages) if STEP in stage.modules)

    def graph(self) -> nx.DiGraph:
        """The stage graph without the data source; nodes are stage indices."""
        return stage_graph(len(self.stages), self.edges)

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

    def intervals(self, stage: int, batch_size: int | None = None) -> tuple[tuple[int, int], ...]:
        """Samples `[start, stop)` of each micro-batch of a stage, in sizes that differ by one at most. SOURCE: as the
        sink."""
        total = self.batch_size if batch_size is None else batch_size
        size = self.stages[self.step_stage if stage == SOURCE else stage].micro_batch_size
        return _intervals(size, total, self.period or total)

    def micro_batch_of(self, stage: int, sample: int, batch_size: int | None = None) -> int:
        """Number of the micro-batch of a stage that a sample is in."""
        return bisect.bisect_right(self.intervals(stage, batch_size), (sample, inf)) - 1

    def share(self, stage: int, device: int, number: int, batch_size: int | None = None) -> tuple[int, int]:
        """The samples of micro-batch `number` that the replica of `stage` on `device` computes; may be empty."""
        devices = self.devices_of(stage)
        start, stop = self.intervals(stage, batch_size)[number]
        replica, count = devices.index(device), len(devices)
        if self.stages[self.step_stage if stage == SOURCE else stage].round_robin:
            return (start, stop) if number % count == replica else (start, start)
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
        content = {"version": VERSION, **json.loads(json.dumps(asdict(self)))}  # tuples become lists
        del content["period"]  # of programs, not of plans
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
        return validated(cls, content, place=place, error=PlanError, remedy=_REMEDY)


VERSION: Final = 1
"""The version of the plan files that are written; files without one are of version 1."""

_REMEDY: Final = "Write plans with `gpp-plan ... output=plan.yaml`."


def _without_version(place: str, content: Any) -> Any:
    if not isinstance(content, dict) or "version" not in content:
        return content
    version = content["version"]
    if isinstance(version, int) and version > VERSION:
        raise PlanError(
            f"{place}: version is {version}, and this release of lightning-gpp reads plans up to version {VERSION}. "
            "Update lightning-gpp."
        )
    if version is not VERSION:
        raise PlanError(f"{place}: version is {version!r}; it must be {VERSION}, or left out.")
    return {key: value for key, value in content.items() if key != "version"}


def shared_parameter(name: str, stages: Sequence[str]) -> PlanError:
    """The error for a parameter that several stages use, so that it cannot be sharded."""
    return PlanError(
        f"strategy.sharding=fsdp: parameter {name!r} is used by the stages {' and '.join(stages)} and cannot be "
        "sharded over the replicas of one. Use strategy.sharding=zero1."
    )


def topological(pairs: Iterable[tuple[int, int]], num_stages: int) -> list[int]:
    """Stages in a topological order that keeps the given one where pairs allow it; empty if they form a cycle."""
    following: list[list[int]] = [[] for _ in range(num_stages)]
    missing = [0] * num_stages
    for src, dst in pairs:
        following[src].append(dst)
        missing[dst] += 1
    ready = [stage for stage in range(num_stages) if not missing[stage]]
    order = []
    while ready:
        stage = heappop(ready)
        order.append(stage)
        for other in following[stage]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, other)
    return order if len(order) == num_stages else []


@lru_cache(maxsize=1024)  # schedules ask for them once per action
def _intervals(size: int, total: int, period: int) -> tuple[tuple[int, int], ...]:
    """Parts of at most `size` samples of `total`, which do not reach from one period into the next."""
    ends = [(begin, min(begin + period, total)) for begin in range(0, total, period)]
    return tuple((begin + start, begin + stop) for begin, end in ends for start, stop in even_parts(end - begin, size))
