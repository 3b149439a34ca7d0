"""Plans for schedules that partitioners do not know: they weigh actions otherwise, want several stages per device,
or two replicas that work in opposite directions.

A partitioner cuts the model for as many devices as there are stages, and balances them for 1F1B; then the stages are
laid on the real devices, timed, and ordered by the schedule that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.footprint import Footprint
from lightning_gpp.costs.model import CostModel
from lightning_gpp.costs.roofline import Roofline
from lightning_gpp.errors import ConfigError, GPPError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.assignment.estimate import estimate
from lightning_gpp.planning.assignment.layout import both_ways, laid_out
from lightning_gpp.planning.assignment.timed import timed
from lightning_gpp.planning.found import Found, notes_of, partition
from lightning_gpp.planning.request import Request
from lightning_gpp.schedules import compile_program
from lightning_gpp.schedules.registry import method_of
from lightning_gpp.simulation import simulate

Cut = Callable[[str, OperatorGraph, Request], Found]
"""What `partition` does; where several schedules are compared, each search is done once."""

KNOWN: Final = ("1f1b", "gpipe")
"""Schedules that partitioners know, and choose from."""

SEARCHED_AS: Final = "1f1b"
"""The one by which they balance stages for all others."""


def is_folded(request: Request) -> bool:
    """Whether the schedule wants stages in a layout that partitioners do not make."""
    return num_stages_per_device(request) > 1 or method_of(request.schedules[0]).bidirectional


def num_stages_per_device(request: Request) -> int:
    """The user's number, else the schedule's."""
    return request.stages_per_device or method_of(request.schedules[0]).stages_per_device


def partition_for(name: str, graph: OperatorGraph, request: Request, cut: Cut = partition) -> Found:
    """A plan for the schedule that is wanted.

    Raises:
        ConfigError: stages are to have replicas that the schedule cannot have, or there are too few pieces of the
            model.
        PlanError: the model does not fit the devices.
    """
    if is_folded(request):
        check_replicas(request.schedules[0], request.max_replicas)
        return _laid(_cut(name, graph, request, cut), graph, request)
    if set(request.schedules) <= set(KNOWN) and request.sharding == "none":
        return cut(name, graph, request)
    found = cut(name, graph, replace(request, schedules=(SEARCHED_AS,)))
    if request.schedules[0] not in KNOWN:
        found = _of_any_order(found)
    return scheduled(found, replace(found.plan, schedule=request.schedules[0]), graph, request)


def _cut(name: str, graph: OperatorGraph, request: Request, cut: Cut) -> Found:
    unfolded = _unfolded(request)
    try:
        return cut(name, graph, unfolded)
    except PlanError as error:
        number, devices = num_stages_per_device(request), request.cluster.num_devices
        raise PlanError(
            f"strategy.schedule={request.schedules[0]!r} with {number} stages on each of {devices} devices wants "
            f"{unfolded.cluster.num_devices} stages. Choose fewer (strategy.stages_per_device), or fewer devices. Cut "
            f"that fine, there is no plan: {error}"
        ) from error


def _unfolded(request: Request) -> Request:
    """The same for as many devices as there are stages, each with the memory that one of them gets."""
    number, method = num_stages_per_device(request), method_of(request.schedules[0])
    cluster = request.cluster.repeated(number, memory_parts=number * (2 if method.bidirectional else 1))
    return replace(request, cluster=cluster, schedules=(SEARCHED_AS,), max_replicas=1, copies=False)


def _laid(found: Found, graph: OperatorGraph, request: Request) -> Found:
    """What was found for every stage on a device of its own, laid on the request's devices."""
    schedule = request.schedules[0]
    method = method_of(schedule)
    plan = laid_out(replace(found.plan, schedule=schedule), request.cluster.num_devices, method.layout)
    plan = both_ways(graph, plan) if method.bidirectional else plan
    limits = tuple(float(device.memory_bytes) for device in request.cluster.devices)
    found = replace(found, answer=replace(found.answer, alternatives=()), memory_bytes=limits)
    return scheduled(_of_any_order(found, num_stages_per_device(request)), plan, graph, request)


def _of_any_order(found: Found, parts: int = 1) -> Found:
    """With the bound of any schedule: that of the search supposes whole backwards, and what 1F1B has in flight.

    `parts`: devices of the search for each real one.
    """
    name = f"{found.answer.objective_name} of the stages as {SEARCHED_AS}"
    return replace(found, answer=replace(found.answer, objective_name=name, lower_bound=parts * found.busy_seconds))


def scheduled(found: Found, plan: Plan, graph: OperatorGraph, request: Request) -> Found:
    """The same search with another plan as its outcome: timed, ordered and simulated."""
    costs = estimate(
        graph,
        plan,
        request.cluster,
        request.costs or Roofline(graph),
        footprint=request.footprint,
        num_pipelines=found.num_pipelines,
    )
    plan = timed(replace(plan, sharding=request.sharding), costs, found.memory_bytes)
    timeline = simulate(compile_program(plan, copies=found.num_pipelines), costs)
    notes = notes_of(found.partitioner, request.cluster, timeline.makespan)
    return replace(found, plan=replace(plan, notes=notes), timeline=timeline)


def folded(plan: Plan, graph: OperatorGraph, stages_per_device: int | None = None) -> Plan:
    """Stages that a user cut, each on one device, laid as the plan's schedule wants them.

    Args:
        plan: names the schedule.
        graph: of the model.
        stages_per_device: the user's number; by default the schedule's.
    """
    method = method_of(plan.schedule)
    number = stages_per_device or method.stages_per_device
    cut = sum(stage.modules != (STEP,) for stage in plan.stages)
    if number > 1:
        plan = laid_out(plan, -(-cut // number), method.layout)
    return both_ways(graph, plan) if method.bidirectional else plan


def ordered(
    plan: Plan, graph: OperatorGraph, cluster: Cluster, costs: CostModel, footprint: Footprint, schedules: Sequence[str]
) -> Plan:
    """The plan with its figures, ordered by the fastest of these schedules that fits the memory.

    Raises:
        PlanError: none of them can order it; the message is that for the first.
    """
    seconds = estimate(graph, plan, cluster, costs, footprint=footprint)
    limits = tuple(float(device.memory_bytes) for device in cluster.devices[: plan.num_devices])
    plan = timed(plan, seconds, limits)
    if len(schedules) == 1:
        return replace(plan, schedule=schedules[0])
    outcomes: list[tuple[bool, float, Plan]] = []
    failures: list[GPPError] = []
    for schedule in schedules:
        candidate = replace(plan, schedule=schedule)
        try:
            timeline = simulate(compile_program(candidate), seconds)
        except GPPError as error:
            failures.append(error)
            continue
        excess = any(peak > limit for peak, limit in zip(timeline.peak_bytes, limits, strict=True))
        outcomes.append((excess, timeline.makespan, candidate))
    if not outcomes:
        raise failures[0]
    return min(outcomes, key=lambda outcome: outcome[:2])[2]


def check_replicas(schedule: str, max_replicas: int | None) -> None:
    """Refuse replicas for a schedule that lays its stages out itself, each on one device.

    Raises:
        ConfigError: stages may have several.
    """
    if max_replicas is not None and max_replicas > 1:
        raise ConfigError(
            f"strategy.schedule={schedule!r} puts every stage on one device of a pipeline, "
            f"strategy.max_replicas={max_replicas} allows more. Leave max_replicas out and use strategy.num_pipelines "
            "for data parallelism, or choose strategy.schedule=1f1b."
        )
