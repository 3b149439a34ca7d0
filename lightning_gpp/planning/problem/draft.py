"""Drafts: plans as partitioners write them, in numbers of units and devices, and the plans that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import networkx as nx

from lightning_gpp.cluster import Link, Port
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine, OperatorGraph
from lightning_gpp.plan import STEP, Plan, Stage, share_of, topological
from lightning_gpp.planning.assignment.assign import assign, make_plan
from lightning_gpp.planning.assignment.modules import ModuleNode, module_tree, stage_names
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.recomputation import Recompute
from lightning_gpp.planning.problem.units import Value
from lightning_gpp.schedules.work import warm_up_peak
from lightning_gpp.wording import counted


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

    def __str__(self) -> str:
        stages = [
            f"{len(stage.units)}u x{len(stage.devices)}{_again(stage.recompute)}{'o' * stage.offload}"
            f"{f'+{stage.slack}' * (stage.slack > 0)}"
            for stage in self.stages
        ]
        sizes = sorted({stage.micro_batch_size for stage in self.stages})
        notes = ", a chain" * self.chained
        notes += f", {self.sharding}" if self.sharding not in (None, "none") else ""
        number = counted(len(stages), "stage")
        return f"{number} ({', '.join(stages)}), b={'/'.join(map(str, sizes))}, {self.schedule}{notes}"


def _again(recompute: Recompute | None) -> str:
    """The letter r if a stage recomputes, with the number of blocks if it is not the whole stage."""
    return f"r{len(recompute)}" if isinstance(recompute, tuple) else "r" * bool(recompute)


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


class DraftTransfer(NamedTuple):
    """One micro-batch's transfer between two stages without contention: seconds until the last replica has it, and busy
    seconds of each port.

    The transfer goes from all replicas of the one stage to all replicas of the other.
    """

    seconds: float
    ports: dict[Port, float]


Route: TypeAlias = Callable[[int, int], tuple[Link, tuple[Port, ...]]]
"""The link and the ports from one device to another."""


def transfer(route: Route, src: Sequence[int], dst: Sequence[int], size: Affine, num_samples: int) -> DraftTransfer:
    """The transfer of `num_samples` samples from the replicas `src` to the replicas `dst`."""
    seconds, ports = 0.0, dict[Port, float]()
    for i, j, samples in overlaps(src, dst, num_samples):
        link, passed = route(i, j)
        num_bytes = size.at(samples)
        seconds = max(seconds, link.seconds(num_bytes))
        for port in passed:
            ports[port] = ports.get(port, 0.0) + num_bytes / link.bytes_per_second
    return DraftTransfer(seconds, ports)


def overlaps(src: Sequence[int], dst: Sequence[int], num_samples: int) -> Iterator[tuple[int, int, int]]:
    """Pairs of devices whose shares of a micro-batch overlap, and by how many samples."""
    i = j = 0
    while i < len(src) and j < len(dst):
        starts, ends = zip(share_of(num_samples, i, len(src)), share_of(num_samples, j, len(dst)), strict=True)
        if min(ends) > max(starts):
            yield src[i], dst[j], min(ends) - max(starts)
        i, j = i + (ends[0] <= ends[1]), j + (ends[1] <= ends[0])


def in_topological_order(problem: Problem, draft: Draft) -> Draft:
    """The draft with its stages in topological order; stages that do not need each other keep the given order.

    Raises:
        PlanError: the stages form a cycle.
    """
    pairs = list(flows(problem, stage_of_units(problem.num_units, [stage.units for stage in draft.stages])))
    try:
        order = topological(pairs, len(draft.stages))
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(str(src) for src, _ in nx.find_cycle(nx.DiGraph(pairs)))
        raise PlanError(f"The stages {cycle} of the draft form a cycle: each needs a result of the next.") from None
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
    return [tuple(range(num_stages - 1 - stage, num_stages * num_copies, num_stages)) for stage in range(num_stages)]


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
        unused=_unused(problem, draft) if num_pipelines == 1 else (),
    )
    plan = replace(plan, sharding=draft.sharding or "none")
    return plan.chained() if draft.chained else plan, num_pipelines


def _recompute(wanted: Recompute | None, holds_step: bool) -> Recompute:
    """The user's step is never run twice."""
    return False if wanted is None or (wanted is True and holds_step) else wanted


def _unused(problem: Problem, draft: Draft) -> tuple[int, ...]:
    used = {device for stage in draft.stages for device in stage.devices}
    return tuple(device for device in range(problem.num_devices) if device not in used)


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


def compress(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The same stages with the fewest paths: a module replaces its submodules if the stage computes all of it."""
    assignment = assign(graph, stage_modules)
    found: list[list[str]] = [[] for _ in stage_modules]
    _collect(module_tree(graph), {name: set(stages) for name, stages in assignment.items()}, found)
    step = next(index for index, modules in enumerate(stage_modules) if STEP in modules)
    found[step].append(STEP)
    return [tuple(paths) for paths in found]


def _collect(node: ModuleNode, assignment: dict[str, set[int]], found: list[list[str]]) -> None:
    stages: set[int] = set().union(*(assignment[operator.name] for operator in node.all_operators()))
    once = all(len(assignment[operator.name]) == 1 for operator in node.all_operators())
    if len(stages) == 1 and once:
        found[stages.pop()].append(node.path)
    else:
        for child in node.children.values():
            _collect(child, assignment, found)


# -- costs of stages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Figures of a stage replica: seconds and bytes per micro-batch, permanent bytes, seconds of its all-reduce.

    `again`: seconds before the backward, of running the forward again, or of copies to and from the host that neither
    the forward nor the backward hides. `offloaded_bytes`: bytes besides `kept_bytes`, in host memory in between.
    """

    forward: float
    again: float
    backward: float
    kept_bytes: float
    working_bytes: float
    static_bytes: float
    all_reduce: float
    offloaded_bytes: float = 0.0

    def peak(self, in_flight: int) -> float:
        """The most bytes that the replica holds at a time."""
        return warm_up_peak(
            self.static_bytes, self.kept_bytes, self.working_bytes, in_flight, offloaded=self.offloaded_bytes
        )


def stage_figures(problem: Problem, stage: DraftStage) -> StageFigures:
    """The costs of one replica of a stage on the slowest kind of its devices."""
    units = list(stage.units)
    kinds = {problem.cluster.kind(device) for device in stage.devices}
    seconds = [problem.seconds(stage.share, kind) for kind in kinds]
    forward = max(float(entry.forward[units].sum()) for entry in seconds)
    backward = max(float((entry.input_gradient + entry.weight_gradient)[units].sum()) for entry in seconds)
    saved = float(problem.saved_bytes(stage.share)[units].sum())
    late, kept, working, offloaded = 0.0, saved, 0.0, 0.0
    again = forward if stage.recompute is True else 0.0
    if stage.offload:
        kept = input_bytes(problem, stage, trained=True)
        offloaded = max(0.0, saved - kept)
        again = max(_not_hidden(problem, kind, offloaded, (forward, backward)) for kind in kinds)
    elif stage.recompute is True:
        kept, working = input_bytes(problem, stage), saved
    elif stage.recompute:
        late, kept, working = _with_blocks(problem, stage, stage.recompute, kinds, saved)
    return StageFigures(
        forward=forward,
        again=again,
        backward=backward + late,
        kept_bytes=kept,
        working_bytes=working,
        static_bytes=static_bytes(problem, stage, "none"),
        all_reduce=all_reduce_seconds(problem, stage),
        offloaded_bytes=offloaded,
    )


def _not_hidden(problem: Problem, kind: int, num_bytes: float, computing: Iterable[float]) -> float:
    """Seconds by which copies of these bytes to the host and back take longer than the computing that hides them."""
    link = problem.cluster.kinds[kind].host_bytes_per_second
    return sum(max(0.0, num_bytes / link - seconds) for seconds in computing) if link else 0.0


def _with_blocks(
    problem: Problem, stage: DraftStage, paths: Iterable[str], kinds: Iterable[int], saved: float
) -> tuple[float, float, float]:
    """Seconds of the blocks that run again, and bytes that are kept, and that one block needs."""
    numbers = problem.numbers_of_blocks(paths)
    figures = [problem.block_figures(stage.share, kind).of(numbers) for kind in kinds]
    first = figures[0]
    seconds = max(float(entry.seconds.sum()) for entry in figures)
    return seconds, saved - float(first.freed.sum()), float(first.saved.max(initial=0.0))


def static_bytes(problem: Problem, stage: DraftStage, sharding: str) -> float:
    """Bytes of weights, gradients and the optimizer's state on one of the stage's replicas."""
    parameters = float(problem.parameter_bytes[list(stage.units)].sum())
    return parameters * problem.copies(len(stage.devices), sharding)


def all_reduce_seconds(problem: Problem, stage: DraftStage) -> float:
    """Seconds of the all-reduce of a stage's gradients over its replicas."""
    if len(stage.devices) == 1 or not problem.footprint.training:
        return 0.0
    return problem.cluster.all_reduce_seconds(stage.devices, float(problem.parameter_bytes[list(stage.units)].sum()))


def input_bytes(problem: Problem, stage: DraftStage, *, trained: bool = False) -> float:
    """Bytes, data included, that a replica of a stage receives per micro-batch. `trained`: those that get gradients."""
    inside = set(stage.units)
    values = [value for value in problem.units.values if value.num_directions == 2 or not trained]
    values += problem.units.data if not trained else ()
    read = (value for value in values if value.src not in inside and read_by(value, inside))
    return sum(value.bytes.at(stage.share) for value in read)


def read_by(value: Value, units: Set[int]) -> bool:
    """True if one of the units reads the value."""
    return not units.isdisjoint(value.dsts)


# -- simplicity: of two drafts that are nearly as fast, the one that people would draw -------------------------------

Complexity = tuple[int, int, int]
"""Number of stages, of modules whose parts are in different stages, and of different numbers of replicas."""


def complexity(problem: Problem, draft: Draft) -> Complexity:
    """A sort key, simplest first: few stages, borders between blocks instead of inside them, equal replicas."""
    replicas = {len(stage.devices) for stage in draft.stages}
    return len(draft.stages), _divided_modules(problem, draft), len(replicas)


def _divided_modules(problem: Problem, draft: Draft) -> int:
    owner = stage_of_units(problem.num_units, [stage.units for stage in draft.stages])
    owners: dict[str, set[int]] = {}
    for unit, stage in zip(problem.units.units, owner, strict=True):
        for path in unit.modules:
            for parent in _parents(path):
                owners.setdefault(parent, set()).add(stage)
    return sum(len(stages) > 1 for stages in owners.values())


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
