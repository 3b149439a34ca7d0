"""Lightning's view of pipeline parallelism: processes, communication between ranks, steps and checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp._compat.lightning import (
    current_hook,
    gather_over,
    layer_sync,
    reduce_over,
    set_rank_zero,
    subprocess_launcher,
)
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.failure.handshake import exchange_through_store
from lightning_gpp.failure.monitor import INTERRUPTED, FailureMonitor
from lightning_gpp.failure.processes import release_from_parent
from lightning_gpp.option import documents, takes_fields_of
from lightning_gpp.plan import Plan
from lightning_gpp.simulation import Timeline
from lightning_gpp.strategy.arguments import Arguments
from lightning_gpp.strategy.checkpoint_file import AtomicCheckpointIO
from lightning_gpp.strategy.checks import check_layer_sync
from lightning_gpp.strategy.data import Placeholder, distribute
from lightning_gpp.strategy.guard import Guard
from lightning_gpp.strategy.preemption import Preempted, Preemption
from lightning_gpp.strategy.processes import meeting_point, start_process_group, tie_to_launcher
from lightning_gpp.strategy.run import Run
from lightning_gpp.training.checkpoint import KEY, entry, load_state
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options
from lightning_gpp.training.parameters import move
from lightning_gpp.training.predicted import simulated
from lightning_gpp.training.setup import join, pipelines_of

log = logging.getLogger(__name__)


@documents(Options)
class GPPStrategy(ParallelStrategy):
    """Train an unmodified LightningModule as a pipeline of stages that form a directed acyclic graph.

    Raises:
        ConfigError: a setting cannot work, whatever the model.
        PlanError: the plan's file cannot be read.
    """

    strategy_name = "gpp"

    @takes_fields_of(Arguments)
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
        self._known: Plan | None = None
        self._resumed: dict[str, Any] = {}
        self._end: BaseException | None = None
        self._accumulating = False

    # -- processes ----------------------------------------------------------------------------------------------------

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
        """True if processes divide the data: only pipelines are data-parallel, stages are not."""
        return self.num_pipelines > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers divide the data among pipelines."""
        control = self._control
        return {"num_replicas": self.num_pipelines, "rank": 0 if control is None else control.pipeline}

    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            tie_to_launcher(self.cluster_environment)
        self._launcher = subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's rank-zero functions which rank this is."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
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
        if self._guard is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self._guard.stops_for(Preemption(trainer, control, self._monitor, self.cluster_environment))

    def _monitored(self) -> FailureMonitor:
        return FailureMonitor.within(
            self.options.failure_timeout, rank=self.global_rank, world_size=self.world_size, describe=self._describe
        )

    def _meet(self, environment: ClusterEnvironment, monitor: FailureMonitor) -> Control:
        """Start the watch, then what would wait for a rank that has ended: process group and mesh."""
        options = self.options
        store = meeting_point(environment, timedelta(seconds=monitor.patience))
        monitor.start(None if store is None else exchange_through_store(store))
        release_from_parent()
        start_process_group(environment, options.process_group_backend, self.root_device, options.timeout, store)
        if self._control is None:
            self._control = join(options, self.global_rank, self.world_size)
        return self._control

    def _describe(self) -> str:
        engine = self._engine
        return "set-up" if engine is None else engine.describe()

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

    # -- set-up and end -----------------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module of a new run."""
        same = self._run is not None and self._run.module is model
        self._known = self.plan if same else None
        super().connect(model)
        self._run, self._resumed = None, {}

    def process_dataloader(self, dataloader: object) -> object:
        """The data loader where the user's step runs, elsewhere one of the same length without data."""
        return dataloader if self._control is None else distribute(dataloader, self._control)

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the module, make a plan and place parameters (in evaluation, only at the first mini-batch)."""
        if self.accelerator is None or self.model is None or self._control is None:
            raise ConfigError("The strategy was set up without an accelerator, a module or processes; use a Trainer.")
        self.accelerator.setup(trainer)
        check_layer_sync(layer_sync(self))
        self.model = self.precision_plugin.convert_module(self.model)
        self._run = Run(
            trainer, self, control=self._control, options=self.options, resumed=self._resumed, known=self._known
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self._run.set_up_training()
        self._run.attach()
        self.setup_precision_plugin()

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other ranks; from now on this rank waits for nobody, unless all stop together."""
        self._end = exception
        if self._monitor is not None and not isinstance(exception, Preempted):
            self._monitor.report(exception)

    def teardown(self) -> None:
        """Detach from the module; after a normal end rank 0's module is complete again.

        Raises:
            SystemExit: for a signal that came after the last step, or with the exit code of Ctrl-C.
        """
        if self._end is None and self._guard is not None:
            self._guard.boundary(ended=True)
        if self._run is not None:
            self._run.detach(complete=self._end is None)
        self.precision_plugin.teardown()
        for part in (self.cluster_environment, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()
        if self._monitor is not None:
            self._monitor.stop()
        if self._guard is not None:
            self._guard.remove(self._end)
        self._monitor = self._guard = None
        if isinstance(self._end, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED)

    def model_to_device(self) -> None:
        """Move this rank's part of the module to its device."""
        if self.lightning_module is not None:
            move(self.lightning_module, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the CPU (`empty_init`: without memory); each rank keeps only its part."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, and tell the ranks of the pipeline its size and form; they get a placeholder."""
        run, module = self._run, self.lightning_module
        if run is None or module is None or current_hook(module) != "batch_to_device":
            return super().batch_to_device(batch, device, dataloader_idx)
        if not run.control.runs_step:
            known = run.incoming.announce(None)
            return Placeholder(torch.empty(run.incoming.batch_size, 0)) if known else None
        if run.reading.active:
            return run.reading.deliver()
        batch = super().batch_to_device(batch, device, dataloader_idx)
        run.incoming.announce(batch)
        return batch

    def on_train_start(self) -> None:
        """Attach to the training loop."""
        self._running.begin_training()

    def on_validation_start(self) -> None:
        """Take part in a loop of validation."""
        self._running.begin_evaluation("validation_step")

    def on_test_start(self) -> None:
        """Take part in the loop of testing."""
        self._running.begin_evaluation("test_step")

    def on_predict_start(self) -> None:
        """Take part in the loop of prediction."""
        self._running.begin_evaluation("predict_step")

    def on_validation_end(self) -> None:
        """Leave the loop."""
        self._running.reading.end()

    on_test_end = on_predict_end = on_validation_end

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forwards and backwards of a mini-batch; returns the detached loss, on all ranks of the pipeline."""
        return self._running.steps.train(self._training, [*args, *kwargs.values()], last=not self._accumulating)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it."""
        return self._running.steps.evaluate("validation_step", [*args, *kwargs.values()])

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it."""
        return self._running.steps.evaluate("test_step", [*args, *kwargs.values()])

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it; None elsewhere."""
        return self._running.steps.evaluate("predict_step", [*args, *kwargs.values()])

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the hooks around backward. The step has computed the gradients; here they are reduced over ranks."""
        module = self.lightning_module
        if module is None:
            raise ConfigError("The strategy has no module; use trainer.fit(model).")
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if not self._accumulating:
            self._training.sum_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local between the mini-batches of one optimizer step."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise ConfigError("A step was run outside of trainer.fit, validate, test and predict.")
        return self._run

    @property
    def _engine(self) -> Engine | None:
        return None if self._run is None else self._run.steps.engine

    @property
    def _training(self) -> Engine:
        if self._engine is None:
            raise ConfigError("A training step was run outside of trainer.fit.")
        return self._engine

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full module's state, under original names; complete on global rank 0. All ranks must call it."""
        engine = self._engine
        return super().lightning_module_state_dict() if engine is None or self._failed else engine.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The undivided optimizer's state in the user's indexing; complete on global rank 0. All ranks must call it."""
        alone = self._run is None or self._failed
        return super().optimizer_state(optimizer) if alone else self._running.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on global rank 0; after a failure of this rank, which has only its part, do nothing."""
        if self._failed and self.world_size > 1:
            log.warning("No checkpoint is written to %s: this rank has failed, and the others have ended.", filepath)
            return
        if self._engine is not None:
            checkpoint[KEY] = entry(self._engine.job.seed, self._engine.num_steps, str(self._engine.plan))
            if "optimizer_states" in checkpoint:  # missing if only weights are saved
                checkpoint[KEY]["pipeline"] = self._engine.pipeline_state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of this strategy, under any plan, or of plain Lightning."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._resumed = dict(checkpoint.get(KEY, {}))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state dict; once parameters are placed, keep this rank's part."""
        if self.lightning_module is None:
            raise ConfigError("The strategy has no module to load a checkpoint into; use a Trainer.")
        load = partial(load_state, self.lightning_module) if self._engine is None else self._engine.load_state_dict
        load(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizers' states."""
        self._running.load_optimizers(checkpoint["optimizer_states"])

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None before there is one."""
        return None if self._engine is None else self._engine.plan

    def timeline(self) -> Timeline:
        """The simulated timeline of a mini-batch under the plan.

        Raises:
            PlanError: there is no plan yet.
        """
        engine = self._engine
        if engine is None:
            raise PlanError("There is no plan yet; it is made when trainer.fit starts, or at the first mini-batch.")
        return simulated(engine.plan, engine.graph, engine.machine(), self.num_pipelines)
