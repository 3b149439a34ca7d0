"""The ranks of a job, as Lightning's strategies have them: processes, their watch, and what they tell each other."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gpp._compat.lightning import gather_over, reduce_over, set_rank_zero, subprocess_launcher
from lightning_gpp._compat.lightning_module import set_device_mesh
from lightning_gpp.errors import ConfigError
from lightning_gpp.failure.handshake import exchange_through_store
from lightning_gpp.failure.hangs import Activity, Wait
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import release_from_parent
from lightning_gpp.strategy.arguments import Arguments
from lightning_gpp.strategy.checkpoints import AtomicCheckpointIO, Checkpoints
from lightning_gpp.strategy.guard import Guard
from lightning_gpp.strategy.preemption import Preempted, Preemption
from lightning_gpp.strategy.processes import check_script, meeting_point, start_process_group, tie_to_launcher
from lightning_gpp.strategy.run import Run
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options
from lightning_gpp.training.setup import join, pipelines_of


class RanksStrategy(ParallelStrategy):
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
        self._end: BaseException | None = None
        self._checkpoints = Checkpoints(given, self._current_io)

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process: its connections, its watch, and its run."""
        gone = {id(part) for part in (self._control, self._monitor, self._guard, self._run, self._end)}
        kept = {name: None if id(part) in gone else part for name, part in super().__getstate__().items()}
        return {**kept, "_checkpoints": Checkpoints(self.options, self._current_io)}

    def _current_io(self) -> CheckpointIO:
        return self.checkpoint_io

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if not self.parallel_devices:
            raise ConfigError("The strategy has no devices yet; it gets them from Trainer(accelerator=, devices=).")
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines of the job; set by the trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def num_pipelines(self) -> int:
        """Number of pipeline replicas."""
        world_size = self.num_nodes * self.num_processes
        return pipelines_of(self.options, world_size)

    @property
    def is_distributed(self) -> bool:
        """True if processes divide the data: only pipelines are data-parallel, stages are not.

        Lightning's sampler then orders samples by the seed and the epoch, which shared mini-batches need.
        """
        return self.num_pipelines > 1 or self._shares

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers divide the data among pipelines, which do it themselves with shared mini-batches."""
        control = self._control
        if self._shares:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.num_pipelines, "rank": 0 if control is None else control.pipeline}

    @property
    def _shares(self) -> bool:
        """True if pipelines load shares of the same mini-batches; in prediction each has its own samples."""
        module = self.lightning_module
        predicts = module is not None and module.trainer.state.fn == TrainerFn.PREDICTING
        return self.options.mini_batch == "shared" and not predicts

    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            tie_to_launcher(self.cluster_environment)
        check_script(self.cluster_environment, self.num_processes)
        self._launcher = subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's rank-zero functions which rank this is."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(
                (self.node_rank if self.num_nodes > 1 else 0) * self.num_processes + self.local_rank
            )
            environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank_zero(self.global_rank)

    def setup_environment(self) -> None:
        """Initialise the device, the process group, and the watch over the other ranks."""
        # Lightning 2.6 on torch >= 2.12 warns about its own code, in every process
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
        super().setup_environment()
        self.set_world_ranks()
        if self.cluster_environment is None:
            raise ConfigError("The strategy has no cluster environment yet; it gets one from the trainer.")
        self._end = None
        self._monitor = self._monitored()
        if self.lightning_module is not None:
            self._guard = Guard(self.lightning_module.trainer, self._monitor, self.options.grace)
        control = self._meet(self.cluster_environment, self._monitor)
        self._checkpoints.begin()
        if self._guard is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            environment, finish = self.cluster_environment, self._checkpoints.wait
            self._guard.stops_for(Preemption(trainer, control, self._monitor, environment, finish))

    def _monitored(self) -> FailureMonitor:
        return FailureMonitor.within(
            self.options.failure_timeout,
            rank=self.global_rank,
            world_size=self.world_size,
            activity=Activity(describe=self._describe, wait=self._wait),
            collectives=self.options.timeout,
        )

    def _meet(self, environment: ClusterEnvironment, monitor: FailureMonitor) -> Control:
        """Start the watch, then what would wait for a rank that has ended: process group and mesh."""
        options = self.options
        store = meeting_point(environment, timedelta(seconds=monitor.patience))
        monitor.start(None if store is None else exchange_through_store(store))
        release_from_parent()
        start_process_group(environment, options.process_group_backend, self.root_device, options.timeout, store)
        self._control = join(options, self.global_rank, self.world_size)
        if self.lightning_module is not None:
            set_device_mesh(self.lightning_module, self._control.mesh.device_mesh(self.root_device.type))
        return self._control

    def _describe(self) -> str:
        engine = self._engine
        return "set-up" if engine is None else engine.describe()

    def _wait(self) -> Wait | None:
        engine, control = self._engine, self._control
        if engine is not None:
            return engine.wait()
        return None if control is None else control.wait

    # -- what ranks tell each other -----------------------------------------------------------------------------------

    @property
    def _failed(self) -> bool:
        """True if this rank has failed. A rank that was asked to stop has not: all stop together."""
        return self._end is not None and not isinstance(self._end, Preempted)

    @property
    def _alone(self) -> bool:
        """True if no other rank would answer: before there are processes, and in user code that runs on one rank."""
        inside = self._run is not None and self._run.steps.host.user_code.running
        return self._control is None or inside or self._failed

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; inside the user's step, which only one rank runs, do nothing."""
        if self._control is not None and not self._alone:
            self._control.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast `obj` from rank `src`. Inside the user's step, which only one rank runs, returns `obj`."""
        return obj if self._control is None or self._alone else self._control.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the pipelines: stages of one pipeline hold parts of one computation, not copies of it."""
        if self._control is None or self._control.num_pipelines == 1 or not isinstance(tensor, Tensor):
            return tensor
        return reduce_over(tensor, group or self._control.mesh.replica_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all pipelines; with one pipeline, return the tensor itself."""
        if self._control is None or self._control.num_pipelines == 1:
            return tensor
        everyone = group is None or group is dist.group.WORLD
        return gather_over(tensor, self._control.mesh.replica_group if everyone else group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks (or any rank) decided yes."""
        return decision if self._control is None or self._alone else self._control.unanimous(decision, everyone=all)

    @property
    def _engine(self) -> Engine | None:
        return None if self._run is None else self._run.steps.engine
