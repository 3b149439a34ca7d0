"""The devices of a job, and costs measured on them: what plans are made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from lightning_gpp.capture import Capture
from lightning_gpp.cluster import Cluster
from lightning_gpp.costs.measured import MeasuredCosts
from lightning_gpp.costs.model import CostModel, Footprint
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.costs import measure_costs
from lightning_gpp.planning.assignment.complete import resolve_size
from lightning_gpp.stages.undivided import Captured
from lightning_gpp.training.host import Job
from lightning_gpp.training.measured.machine import Machine, of_groups, resolved
from lightning_gpp.training.options import Context, Options
from lightning_gpp.training.planner import TRAINING


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
        number = job.options.delayed_devices or job.control.num_processes
        cluster = resolved(job.options.cluster, number, job.num_nodes, job.device.type)
        cluster = cluster.with_headroom(job.options.memory_headroom)
        machine = Machine(cluster=cluster, footprint=self._footprint, costs=self.costs)
        if job.parallel is None:
            return machine
        return of_groups(machine, job.parallel.cut, job.control.mesh.members_of_devices, self._captured.graph)

    def measured(self, captured: Captured, batch: Any) -> Machine:
        """The same, after measuring the costs of a training step, once, if the user wants that."""
        job, machine = self._job, self.look()
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
