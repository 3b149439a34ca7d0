"""Simulates a plan on the machine that it was made for."""

from __future__ import annotations

from lightning_gpp.cluster.groups import num_processes
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning import estimate
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Period, StageCosts, Timeline, simulate, simulate_period
from lightning_gpp.training.measured.machine import Machine
from lightning_gpp.training.option_values import weight_copies_of


def simulated(plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int = 1) -> Timeline:
    """The timeline of one mini-batch on a machine; without known costs, all actions take the same time.

    Raises:
        PlanError: the machine has fewer devices than the plan.
    """
    costs = costs_of(plan, graph, machine, num_pipelines)
    return simulate(compile_program(plan, training=machine.footprint.training, copies=num_pipelines), costs)


def _knows_costs(graph: OperatorGraph, machine: Machine) -> bool:
    return machine.costs is not None or any(operator.flops.at(1) for operator in graph)


def without_flush(
    plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int, weights: str
) -> Period | None:
    """The steady state of a plan under a weight policy, simulated on a machine; None in synchronous training, and for
    inference, whose program is another.

    Raises:
        PlanError: the machine has fewer devices than the plan.
        ScheduleError: the schedule has no steady state.
    """
    copies = weight_copies_of(weights)
    if copies is None or not machine.footprint.training:
        return None
    return simulate_period(plan, costs_of(plan, graph, machine, num_pipelines), num_pipelines, copies)


def costs_of(plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int) -> StageCosts:
    """Seconds and bytes of the plan's stages on a machine; without known costs, all actions take the same time.

    Raises:
        PlanError: the machine has fewer devices than the plan.
    """
    if not _knows_costs(graph, machine):
        return StageCosts.uniform(plan)
    cluster, there = machine.cluster, num_processes(machine.cluster)
    if there < plan.num_processes:
        raise PlanError(
            f"The plan needs {plan.num_processes} devices, the cluster {cluster.name!r} has {there}. Give "
            "the cluster more (cluster.num_nodes, cluster.num_devices), or make a plan for it."
        )
    copies = num_pipelines if there >= plan.num_processes * num_pipelines else 1
    return estimate(graph, plan, cluster, machine.costs, footprint=machine.footprint, num_pipelines=copies)
