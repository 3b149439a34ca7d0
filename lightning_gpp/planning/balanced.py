"""The balanced partitioner: one stage per device, branches side by side, the estimated step as short as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from lightning_gpp.costs.roofline import CPU, Device, Link
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assign import StageDraft, assign, make_plan
from lightning_gpp.planning.devices import number_devices
from lightning_gpp.planning.micro_batches import resolve_size
from lightning_gpp.planning.modules import ModuleNode, module_tree, stage_names
from lightning_gpp.planning.partition import Partition, Problem
from lightning_gpp.planning.registry import Request, register
from lightning_gpp.planning.search import search
from lightning_gpp.planning.units import UnitGraph, find_units

FINENESS = (1, 2, 4, 8)
"""Pieces per device that the model is cut into, from coarse to fine."""

WORTH_CUTTING = 0.9
"""Finer pieces must shorten the step to this part of what coarser ones reach: whole modules run and read better."""

MAX_UNITS = 400
"""Finer pieces than this are not tried once there is a partition."""


def balanced(
    graph: OperatorGraph,
    *,
    num_devices: int,
    batch_size: int,
    num_micro_batches: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str = "1f1b",
    model: str = "",
    device: Device = CPU,
    link: Link | None = None,
) -> Plan:
    """Cut a model into one stage per device. The arguments are those of `Request`.

    Modules are cut as coarsely as possible. Stages minimise the length of a step, estimated as the longest path of the
    stage graph plus the slowest stage for each further micro-batch; see `Partition.score`.

    Raises:
        ConfigError: the micro-batches do not fit the mini-batch.
        PlanError: the model has fewer pieces than there are devices.
    """
    request = Request(
        num_devices=num_devices,
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        model=model,
        device=device,
        link=link,
    )
    return partition_balanced(graph, request)


@register("balanced")
def partition_balanced(graph: OperatorGraph, request: Request) -> Plan:
    """See `balanced`."""
    # Before there are stages, the depth that decides the number of micro-batches is at most the number of devices.
    size = _size(request, request.num_devices)
    plan = number_devices(_plan(graph, request, _best(graph, request, size), size))
    size = _size(request, plan.depth)
    return replace(plan, stages=tuple(replace(stage, micro_batch_size=size) for stage in plan.stages))


def _size(request: Request, depth: int) -> int:
    return resolve_size(request.batch_size, request.num_micro_batches, request.micro_batch_size, 2 * depth)


def _best(graph: OperatorGraph, request: Request, size: int) -> Partition:
    best: Partition | None = None
    for units in _finer_and_finer(graph, request, size):
        if best and (len(units.units) > MAX_UNITS or best.bottleneck * request.num_devices < 1.05 * units.seconds):
            break
        found = search(_problem(units, request, size))
        if best is None or found.score() < WORTH_CUTTING * best.score():
            best = found
    if best is None:
        raise _too_few(graph, request, size)
    return best


def _finer_and_finer(graph: OperatorGraph, request: Request, size: int) -> Iterator[UnitGraph]:
    """Units that are enough for the devices."""
    count = 0
    for pieces in (*FINENESS, inf):
        units = _units(graph, request, size, pieces * request.num_devices)
        if len(units.units) > count and len(units.units) >= request.num_devices:
            count = len(units.units)
            yield units


def _units(graph: OperatorGraph, request: Request, size: int, num_pieces: float) -> UnitGraph:
    return find_units(graph, num_pieces=num_pieces, num_samples=size, device=request.device)


def _problem(units: UnitGraph, request: Request, size: int) -> Problem:
    return Problem(
        units=units,
        num_stages=request.num_devices,
        num_micro_batches=-(-request.batch_size // size),
        link=request.connection,
    )


def _too_few(graph: OperatorGraph, request: Request, size: int) -> PlanError:
    units = len(_units(graph, request, size, inf).units)
    return PlanError(
        f"The model can be cut into at most {units} stages, but a pipeline has {request.num_devices} devices "
        f"(trainer.devices). Set trainer.devices to at most {units}, or run copies of the pipeline: trainer.devices a "
        "multiple of strategy.num_pipelines."
    )


def _plan(graph: OperatorGraph, request: Request, partition: Partition, size: int) -> Plan:
    stages: list[list[str]] = [[] for _ in range(request.num_devices)]
    for unit, stage in zip(partition.problem.units.units, partition.stage, strict=True):
        stages[stage].extend(unit.modules)
    modules = compress(graph, stages)
    drafts = [
        StageDraft(name=name, modules=paths, devices=(index,), micro_batch_size=size)
        for index, (name, paths) in enumerate(zip(stage_names(modules), modules, strict=True))
    ]
    return make_plan(graph, drafts, batch_size=request.batch_size, schedule=request.schedule, model=request.model)


def compress(graph: OperatorGraph, stage_modules: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The same stages by the fewest paths: a module instead of all its submodules where the stage computes it whole."""
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
