"""The devices of a job, and costs measured on them: what plans are made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_gpp.costs.model import CostModel, Footprint
from lightning_gpp.stages.undivided import Captured
from lightning_gpp.training.host import Job
from lightning_gpp.training.measured.costs import measured_costs
from lightning_gpp.training.measured.machine import Machine, of_groups, resolved
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
