"""Drafts: plans as partitioners write them, in numbers of units and devices, and the plans that they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import networkx as nx

from lightning_gpp.cluster.groups import num_members
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import STEP, Plan, Stage, topological
from lightning_gpp.planning.assignment.assign import compress, make_plan
from lightning_gpp.planning.assignment.modules import stage_names
from lightning_gpp.planning.problem.problem import Problem

Recompute: TypeAlias = bool | tuple[str, ...]
"""See `plan.Stage.recompute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStage:
    """Units on devices; each device takes an equal share of every micro-batch of `micro_batch_size` samples.

    `recompute`, `offload`, `slack`: see `plan.Stage`; `recompute` None: the problem decides about both of them
    (`Evaluator.fitted`).
    """

    units: tuple[int, ...]
    devices: tuple[int, ...]
    micro_batch_size: int
    recompute: Recompute | None = None
    offload: bool = False
    slack: int = 0

    @property
    def share(self) -> int:
        """Number of samples in the largest share."""
        return -(-self.micro_batch_size // len(self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Stages in any order, and the schedule's name.

    `chained`: the stages run as a chain in their topological order, even if they do not need each other, as in
    partitioners that know only chains.
    `sharding`: see `plan.Plan`; None: the problem decides.
    """

    stages: tuple[DraftStage, ...]
    schedule: str = "1f1b"
    chained: bool = False
    sharding: str | None = None

    @property
    def size(self) -> int:
        """Samples of a micro-batch, where all stages have the same."""
        return self.stages[0].micro_batch_size

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The units of every stage."""
        return tuple(stage.units for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of every stage."""
        return tuple(len(stage.devices) for stage in self.stages)

    @property
    def slack(self) -> tuple[int, ...]:
        """The slack of every stage."""
        return tuple(stage.slack for stage in self.stages)

    @property
    def num_devices(self) -> int:
        """Number of devices that have a stage; a problem may have more, which stay idle."""
        return sum(self.replicas)

    def with_stages(self, **changes: Iterable[Any]) -> Draft:
        """The draft with one new value for every stage of each of these fields."""
        rows = (dict(zip(changes, row, strict=True)) for row in zip(*changes.values(), strict=True))
        return replace(self, stages=tuple(replace(stage, **row) for stage, row in zip(self.stages, rows, strict=True)))

    def opened(self) -> Draft:
        """The draft with its measures for the memory left open."""
        stages = tuple(replace(stage, recompute=None, offload=False) for stage in self.stages)
        return replace(self, stages=stages, sharding=None)


@dataclass(frozen=True, slots=True)
class Flow:
    """The data flow between two stages of a draft: bytes per micro-batch in the forward and in the backward."""

    forward: Affine
    backward: Affine
    differentiable: bool


def stage_of_units(num_units: int, stages: Sequence[Iterable[int]]) -> list[int]:
    """The stage of every unit; -1 for units in no stage."""
    owner = [-1] * num_units
    for index, units in enumerate(stages):
        for unit in units:
            owner[unit] = index
    return owner


def flows(problem: Problem, owner: Sequence[int]) -> dict[tuple[int, int], Flow]:
    """The edges of the stage graph. A value travels once to each stage that reads it."""
    sums: dict[tuple[int, int], list[float]] = {}
    for src_unit, readers, sizes in problem.flow_table:
        src = owner[src_unit]
        for dst in {owner[unit] for unit in readers} if len(readers) > 1 else (owner[readers[0]],):
            if dst != src:
                entry = sums.get((src, dst))
                sums[src, dst] = [a + b for a, b in zip(entry, sizes, strict=True)] if entry else list(sizes)
    return {pair: Flow(Affine(a, b), Affine(c, d), bool(c or d)) for pair, (a, b, c, d) in sorted(sums.items())}


def with_chain(edges: Mapping[tuple[int, int], Flow], num_stages: int) -> dict[tuple[int, int], Flow]:
    """The edges of stages in topological order, and artificial ones that make a chain of them, which carry no bytes.

    The counterpart of `Plan.chained`.
    """
    token = Flow(Affine(), Affine(), differentiable=True)
    return {**{(index, index + 1): token for index in range(num_stages - 1)}, **edges}


def in_topological_order(problem: Problem, draft: Draft) -> Draft:
    """The draft with its stages in topological order; stages that do not need each other keep the given order.

    Raises:
        PlanError: the stages form a cycle.
    """
    pairs = list(flows(problem, stage_of_units(problem.num_units, [stage.units for stage in draft.stages])))
    order = topological(pairs, len(draft.stages))
    if not order:
        cycle = " -> ".join(str(src) for src, _ in nx.find_cycle(nx.DiGraph(pairs)))
        raise PlanError(f"The stages {cycle} of the draft form a cycle: each needs a result of the next.")
    return replace(draft, stages=tuple(draft.stages[index] for index in order))


Devices = list[tuple[int, ...]]
"""Devices of every stage, in topological order."""


def side_by_side(replicas: Sequence[int]) -> Devices:
    """Devices with a stage's replicas side by side: all-reduces stay inside a node. The last stage is on device 0."""
    stops = list(accumulate(reversed(replicas)))
    starts = [0, *stops][: len(stops)]
    return [tuple(range(start, stop)) for start, stop in zip(starts, stops, strict=True)][::-1]


def copies(num_stages: int, num_copies: int) -> Devices:
    """Devices with pipeline replicas one after the other, so that stages that exchange tensors are neighbours."""
    return [tuple(range(start, num_stages * num_copies, num_stages)) for start in reversed(range(num_stages))]


def layouts(replicas: Sequence[int]) -> list[Devices]:
    """All layouts that these numbers of replicas allow."""
    found = [side_by_side(replicas)]
    if len(set(replicas)) == 1 and replicas[0] > 1:
        found.append(copies(len(replicas), replicas[0]))
    return found


def realise(problem: Problem, draft: Draft, model: str = "") -> tuple[Plan, int]:
    """The plan of a draft, and the number of its pipelines.

    A draft whose stages all have r replicas, with the j-th replicas side by side on the j-th part of the devices,
    becomes r pipeline replicas if the problem allows it. In any other draft the user's step runs on one device: it
    becomes a stage of its own if its stage has replicas.

    Args:
        problem: the problem that the draft answers.
        draft: has the stage of the user's step, the problem's last unit, on device 0.
        model: fingerprint written into the plan.

    Raises:
        PlanError: the stages form a cycle.
    """
    draft, num_pipelines = in_topological_order(problem, draft), 1
    if problem.replicable:
        draft, num_pipelines = unreplicated(problem, draft)
    used = {device for stage in draft.stages for device in stage.devices}
    unused = tuple(device for device in range(problem.num_devices) if device not in used)
    modules = [[path for unit in stage.units for path in problem.units.units[unit].modules] for stage in draft.stages]
    paths = compress(problem.graph, modules)
    drafts = [
        Stage(
            name=name,
            modules=paths[index],
            devices=stage.devices,
            micro_batch_size=stage.micro_batch_size,
            recompute=_recompute(stage.recompute, STEP in paths[index]),
            offload=stage.offload,
            slack=stage.slack if draft.schedule == "1f1b" and STEP not in paths[index] else 0,
        )
        for index, (name, stage) in enumerate(zip(stage_names(paths), draft.stages, strict=True))
    ]
    batch_size = problem.batch_size // num_pipelines
    drafts = list(_with_one_step(drafts))
    plan = make_plan(
        problem.graph,
        drafts,
        batch_size=batch_size,
        schedule=draft.schedule,
        model=model,
        unused=unused if num_pipelines == 1 else (),
    )
    members = num_members(problem.cluster.devices[0])
    plan = replace(plan, sharding=draft.sharding or "none", tensor_parallel_size=members)
    return plan.chained() if draft.chained else plan, num_pipelines


def _recompute(wanted: Recompute | None, holds_step: bool) -> Recompute:
    """The user's step is never run twice."""
    return False if wanted is None or (wanted is True and holds_step) else wanted


def unreplicated(problem: Problem, draft: Draft) -> tuple[Draft, int]:
    """The draft of one pipeline, and the number of pipeline replicas in the given draft."""
    number, width = len(draft.stages[0].devices), len(draft.stages)
    sizes = [problem.batch_size // problem.num_slices, *(stage.micro_batch_size for stage in draft.stages)]
    regular = all(
        stage.devices == tuple(range(stage.devices[0], width * number, width)) and stage.devices[0] < width
        for stage in draft.stages
    )
    if number == 1 or not regular or any(size % number for size in sizes):
        return draft, 1
    return replace(draft, stages=tuple(_first_replica(stage) for stage in draft.stages)), number


def _first_replica(stage: DraftStage) -> DraftStage:
    number = len(stage.devices)
    return replace(stage, devices=stage.devices[:1], micro_batch_size=stage.micro_batch_size // number)


def _with_one_step(drafts: Sequence[Stage]) -> Iterator[Stage]:
    for draft in drafts:
        rest = tuple(path for path in draft.modules if path != STEP)
        if STEP not in draft.modules or len(draft.devices) == 1:
            yield draft
        else:
            yield replace(draft, modules=rest)
            step = replace(draft, name="step", modules=(STEP,), devices=(min(draft.devices),))
            yield replace(step, recompute=False, offload=False)
