"""The machine of a plan: the devices of the job, the costs of operators on them, the footprint of parameters; and plans
simulated on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gpp.capture import Capture
from lightning_gpp.cluster import CLUSTERS, HOST, Cluster, Node, preset_cluster
from lightning_gpp.cluster.groups import grouped, num_members, num_processes
from lightning_gpp.costs.measured import MeasuredCosts
from lightning_gpp.costs.model import OPTIMIZER_STATES, PRECISIONS, CostModel, Footprint, ForwardOnly, Roofline
from lightning_gpp.costs.tensor_parallel import MemberCosts
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.measure.detect import detect, processes
from lightning_gpp.plan import Plan
from lightning_gpp.planning import estimate
from lightning_gpp.planning.advice import shortage
from lightning_gpp.planning.assignment.complete import resolve_size
from lightning_gpp.planning.problem.prediction import Prediction, memory_limits
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Period, StageCosts, Timeline, simulate, simulate_period
from lightning_gpp.stages.build import Captured
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.option_values import weight_copies_of
from lightning_gpp.training.options import Context, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of one pipeline.

    Args:
        cluster: device d of the pipeline is device d of the cluster, without the headroom of its memory.
        footprint: what a device keeps per byte of parameters.
        costs: seconds of operators; None for the roofline model.
        divided: the parameters that the members of a device divide, with the dimension that is cut.
    """

    cluster: Cluster
    footprint: Footprint = field(default_factory=Footprint)
    costs: CostModel | None = None
    divided: Mapping[str, int] = field(default_factory=dict)

    def part(self, graph: OperatorGraph) -> OperatorGraph:
        """The part of a graph that one process of a device computes."""
        if not self.divided:
            return graph
        return part_of(replace(graph, divided=dict(self.divided)), num_members(self.cluster.devices[0]))

    def for_inference(self, graph: OperatorGraph) -> Machine:
        """The same machine for a run that does not train: no backwards, gradients and optimizer."""
        known = self.costs is not None or any(operator.flops.at(1) for operator in graph)
        costs = ForwardOnly(self.costs or Roofline(graph)) if known else None
        return replace(self, costs=costs, footprint=replace(self.footprint, training=False))


def resolved(cluster: Cluster | str | None, num_devices: int, num_nodes: int = 1, device_type: str = "cpu") -> Cluster:
    """The first `num_devices` devices: rank r of the job is device r of the cluster.

    Args:
        cluster: the name of a preset, with as many nodes as the job needs, or a cluster; None for the present machine.
        num_devices: number of devices of the job.
        num_nodes: number of machines of the job.
        device_type: "cuda" or "cpu", for the present machine.

    Raises:
        ConfigError: the cluster has fewer devices.
    """
    if cluster is None:
        return present(num_devices, num_nodes, device_type)
    if isinstance(cluster, str):
        num_nodes = num_nodes if cluster == HOST else -(-num_devices // CLUSTERS[cluster].num_devices)
        return preset_cluster(cluster, num_nodes, num_devices)
    if num_devices > cluster.num_devices:
        raise ConfigError(
            f"The cluster {cluster.name!r} (strategy.cluster) has {cluster.num_devices} devices, the job needs "
            f"{num_devices} (trainer.devices x trainer.num_nodes). Give the cluster more nodes (num_nodes)."
        )
    return cluster if num_devices == cluster.num_devices else cluster.subset(range(num_devices))


def of_groups(machine: Machine, divided: Mapping[str, int], members: int, graph: OperatorGraph) -> Machine:
    """The machine whose devices are groups of adjacent devices, with the costs of one of them.

    Args:
        machine: all devices.
        divided: the dimension along which the members of a group divide each parameter, by name.
        members: number of members of every device.
        graph: the undivided graph.
    """
    known = replace(graph, divided=dict(divided))
    return replace(machine, cluster=grouped(machine.cluster, members), costs=MemberCosts(known), divided=known.divided)


def first(machine: Machine, num_devices: int) -> Machine:
    """The same machine with only its first devices."""
    if machine.cluster.num_devices == num_devices:
        return machine
    return replace(machine, cluster=machine.cluster.subset(range(num_devices)))


def present(num_devices: int, num_nodes: int = 1, device_type: str = "cpu") -> Cluster:
    """The cluster of the job's devices, with all nodes like this machine."""
    count = -(-num_devices // num_nodes)
    machine = detect(count) if device_type == "cuda" else processes(count)
    if num_nodes == 1:
        return machine
    device, link = machine.devices[0], machine.link(0, count - 1) if count > 1 else machine.levels[0].link
    nodes = [Node(device=device, count=count, link=link)] * num_nodes
    usual = {known.devices[0].name: known.levels[1].link for known in CLUSTERS.values()}
    cluster = Cluster.of_nodes(f"{num_nodes} x {machine.name}", nodes, usual.get(device.name, _NETWORK))
    return cluster.subset(range(num_devices))


_NETWORK: Final = CLUSTERS["pcie_a100"].levels[1].link
"""Link between nodes with devices of kinds that no preset has."""


def footprint_of(optimizers: Iterable[Optimizer], precision: str) -> Footprint:
    """The footprint of these optimizers; Adam's if there are none, or one is of an unknown kind.

    Args:
        optimizers: the result of `configure_optimizers`.
        precision: Lightning's precision; one without figures counts as 32-true.
    """
    names = [_optimizer_name(optimizer) for optimizer in optimizers]
    return Footprint(
        optimizer=max(names, key=OPTIMIZER_STATES.__getitem__, default="adam"),
        precision=precision if precision in PRECISIONS else "32-true",
    )


def _optimizer_name(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__.lower()
    if name == "sgd":
        return "sgd_momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"
    return name if name in OPTIMIZER_STATES else "adam"


def simulated(
    plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int = 1, work: Iterable[float] = ()
) -> Timeline:
    """The timeline of one mini-batch on a machine; without known costs, all actions take the same time.

    `work`: see `StageCosts`.

    Raises:
        PlanError: the machine has fewer devices than the plan.
    """
    costs = replace(costs_of(plan, graph, machine, num_pipelines), work=tuple(work))
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


def predicted(plan: Plan, graph: OperatorGraph, machine: Machine, num_pipelines: int, weights: str) -> Prediction:
    """The simulation of a given plan, and the memory that its devices have; see `simulated` and `without_flush`."""
    return Prediction(
        plan=plan,
        num_pipelines=num_pipelines,
        timeline=simulated(plan, graph, machine, num_pipelines),
        memory_bytes=memory_limits(plan, machine.cluster),
        period=without_flush(plan, graph, machine, num_pipelines, weights),
    )


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
            f"The plan needs {plan.num_processes} devices, the cluster {cluster.name!r} has {there}. Give the cluster "
            "more nodes (cluster.num_nodes)."
        )
    copies = num_pipelines if there >= plan.num_processes * num_pipelines else 1
    return estimate(graph, plan, cluster, machine.costs, footprint=machine.footprint, num_pipelines=copies)


class JobMachine:
    """The devices of a job, and costs measured on them.

    Attributes:
        costs: measured seconds of operators; only on rank 0.
    """

    def __init__(self, job: Job, footprint: Footprint, captured: Captured) -> None:
        self._job, self._footprint, self._captured = job, footprint, captured
        self.costs: CostModel | None = None

    def look(self) -> Machine:
        """The machine that plans are made for."""
        job = self._job
        cluster = resolved(job.options.cluster, job.control.num_processes, job.num_nodes, job.device.type)
        cluster = cluster.with_headroom(job.options.memory_headroom)
        machine = Machine(cluster=cluster, footprint=self._footprint, costs=self.costs)
        if job.parallel is None:
            return machine
        return of_groups(machine, job.parallel.cut, job.control.num_members, self._captured.graph)

    def shortage(self, plan: Plan) -> str:
        """The memory that a plan lacks, in words; empty if it fits."""
        job, there = self._job, self.look()
        graph = there.part(self._captured.graph)
        found = predicted(plan, graph, there, job.control.num_pipelines, job.options.weights)
        return "" if found.fits else shortage(found, there.cluster, there.footprint)

    def measured(self, batch: Any) -> Machine:
        """The same, after measuring the costs of a training step, once, if the user wants that."""
        job, machine, captured = self._job, self.look(), self._captured
        if job.options.costs == "measured" and captured.step == TRAINING and self.costs is None:
            context = job.host.context(TRAINING)
            self.costs = measured_costs(
                captured, job.module, batch, job.options, machine.cluster, device=job.device, context=context
            )
        return replace(machine, costs=self.costs)


QUARTER: Final = 4


def measured_costs(
    captured: Captured,
    module: nn.Module,
    batch: Any,
    options: Options,
    cluster: Cluster,
    *,
    device: torch.device,
    context: Context,
) -> MeasuredCosts:
    """Measured costs of operators on a device of this machine, with the largest micro-batch and with a quarter of it.

    Args:
        captured: the training step.
        module: the step's module.
        batch: a mini-batch with values.
        options: the options, which may give the size of micro-batches; the default is a quarter of the mini-batch.
        cluster: a cluster whose first device is of the same kind.
        device: the device to measure on.
        context: context in which the step computes.

    Raises:
        ConfigError: the step was not captured, so there are no operators to measure.
    """
    if not isinstance(captured, Capture):
        raise ConfigError(
            "strategy.costs=measured needs a captured step, but this one cannot be captured. Choose "
            "strategy.costs=roofline."
        )
    size = resolve_size(captured.batch_size, options.num_micro_batches, options.micro_batch_size, QUARTER)
    sizes, kind = sorted({max(1, size // QUARTER), size}), cluster.kinds[0]
    return measure_costs(captured, module, batch, device=kind, sizes=sizes, torch_device=device, context=context)
