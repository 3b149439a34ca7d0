"""The ranks of a job, as Lightning's strategies have them: processes, their watch, and what they tell each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy

from lightning_gpp._compat.lightning_module import set_device_mesh
from lightning_gpp.errors import ConfigError
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.strategy.checkpoints import AtomicCheckpointIO, Checkpoints
from lightning_gpp.strategy.guard import Guard
from lightning_gpp.strategy.processes import JobProcesses
from lightning_gpp.strategy.run import Run
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options

_OWN_CODE: Final = ".*treespec, LeafSpec.*"
"""Lightning 2.6 on torch >= 2.12 warns about its own code, in every process."""
_SYNC: Final = "It is recommended to use `self.log\\(.*sync_dist=True\\)`"
"""Lightning takes every process group for data parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Options):
    """The options, and Lightning's components of a strategy."""

    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
    accelerator: Accelerator | None = None


class RanksStrategy(JobProcesses, ParallelStrategy):
    """The part of `GPPStrategy` that starts processes, watches them, and lets them communicate."""

    def __init__(self, given: Arguments) -> None:
        super().__init__(
            given.accelerator,
            given.parallel_devices,
            given.cluster_environment,
            given.checkpoint_io or AtomicCheckpointIO(),
            given.precision_plugin,
        )
        self.options: Options = given
        self._num_nodes = 1
        self._control: Control | None = None
        self._monitor: FailureMonitor | None = None
        self._guard: Guard | None = None
        self._run: Run | None = None
        self._trained: Engine | None = None
        self._end: BaseException | None = None
        self._together = False
        self._checkpoints = Checkpoints(given, self._current_io)

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process: its connections, its watch, and its run."""
        parts = (self._control, self._monitor, self._guard, self._run, self._trained, self._end)
        gone = {id(part) for part in parts}
        kept = {name: None if id(part) in gone else part for name, part in super().__getstate__().items()}
        return {**kept, "_checkpoints": Checkpoints(self.options, self._current_io)}

    def _current_io(self) -> CheckpointIO:
        return self.checkpoint_io

    @property
    def is_distributed(self) -> bool:
        """True if processes divide the data: only pipelines are data-parallel, stages are not."""
        return self.num_pipelines > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers divide the data among pipelines."""
        control = self._control
        return {"num_replicas": self.num_pipelines, "rank": 0 if control is None else control.pipeline}

    def setup_environment(self) -> None:
        """Initialise the device, the process group, and the watch over the other ranks."""
        silence(self.num_pipelines)
        super().setup_environment()
        self.set_world_ranks()
        if self.cluster_environment is None:
            raise ConfigError("The strategy has no cluster environment yet; it gets one from the trainer.")
        self._end, self._together = None, False
        self._monitor = self._monitored()
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is not None:
            self._guard = Guard(trainer, self._monitor, self.cluster_environment, self._checkpoints.wait)
        control = self._meet(self.cluster_environment, self._monitor)
        self._checkpoints.begin(getattr(trainer, "callbacks", ()))
        if self._guard is not None:
            self._guard.stop_between_steps(control)

    def _meet(self, environment: ClusterEnvironment, monitor: FailureMonitor) -> Control:
        control = super()._meet(environment, monitor)
        if self.lightning_module is not None:
            set_device_mesh(self.lightning_module, control.mesh.device_mesh(self.root_device.type))
        return control

    # -- what ranks tell each other -----------------------------------------------------------------------------------

    @property
    def _failed(self) -> bool:
        """True if this rank has failed, and the others may be elsewhere: there is nobody to communicate with.

        When all stop together, or raise an exception together, each can count on the others.
        """
        return self._end is not None and not self._together

    @property
    def _alone(self) -> bool:
        """True if no other rank would answer: before there are processes, and after a failure."""
        return self._control is None or self._failed

    def _with_others(self) -> Control | None:
        """The way to the other ranks, if they would answer."""
        return None if self._alone else self._control

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the pipelines: stages of one pipeline hold parts of one computation, not copies of it."""
        return self._reduced(tensor, group, reduce_op)

    @property
    def engine(self) -> Engine | None:
        """The engine that trains and evaluates the module; None before there is a plan."""
        return None if self._run is None else self._run.steps.engine


def silence(num_pipelines: int) -> None:
    """Ignore, from now on, warnings of Lightning that are not meant for users of stages."""
    warnings.filterwarnings("ignore", message=_OWN_CODE, category=FutureWarning)
    if num_pipelines == 1:
        warnings.filterwarnings("ignore", message=_SYNC)
