"""Fabric's view of pipeline parallelism: calls of the module in the user's loop run in stages, on all ranks together.

fabric.setup(model, optimizer)     keeps them; nothing is divided yet
model(x), the first time           makes a plan for this call, and places the parameters: an engine
model(x)                           forwards of all micro-batches; every rank gets the result
fabric.backward(loss)              backwards, where autograd comes to a call; gradients are complete at its end
"""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.checkpoints.layout import KEY, entry_of
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.fabric.engine import (
    LazyEngine,
    MirroredLoader,
    PipelinedModule,
    entry_for,
    loaded_into,
    undivided,
)
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.option import documents, refuse_beside, takes_fields_of
from lightning_gpp.plan import Plan
from lightning_gpp.strategy.checkpoints import AtomicCheckpointIO
from lightning_gpp.strategy.processes import JobProcesses
from lightning_gpp.training.control import Control, Mirror
from lightning_gpp.training.data.loaders import divide_samples
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.options import Options
from lightning_gpp.training.whole.whole_step import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricArguments(Options):
    """The options, and Fabric's components of a strategy."""

    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision: Precision | None = None
    accelerator: Accelerator | None = None


def in_own_loop(given: FabricArguments) -> FabricArguments:
    """The arguments for a loop that every rank runs, and that calls the module.

    Raises:
        ConfigError: an option needs a step that Lightning runs.
    """
    problems = {
        "step": (given.step == "micro_batches", "divides mini-batches, which the loop keeps. Leave it out"),
        "tensor_parallel_size": (given.tensor_parallel_size != 1, "is for Lightning's Trainer. Leave it out"),
        "plan": (
            given.tensor_parallel_size == 1 < given.members,
            "has devices of several processes (tensor_parallel_size), for Lightning's Trainer. Choose another plan",
        ),
        "example_batch": (given.example_batch is not None, "is the first call of the module here. Leave it out"),
        "streaming": (given.streaming is True, "needs mini-batches before their turn. Leave it out"),
        "state_dict_type": (given.state_dict_type == "sharded", "makes folders, and fabric.save one file. Use full"),
        "async_save": (given.async_save, "is not for fabric.save, which writes at once. Leave it out"),
    }
    refuse_beside("Fabric", given, problems)
    whole = replace(given, step="whole")
    check_whole(whole, steps_itself=True)
    return whole


@documents(Options)
class GPPFabricStrategy(JobProcesses, ParallelStrategy):
    """Train a module as a pipeline of stages in a loop of your own, with Lightning Fabric.

    Every rank runs the loop, with equal mini-batches and results; only calls of the module are divided.

    Raises:
        ConfigError: an option cannot work, or not in such a loop.
        PlanError: the plan's file cannot be read.
    """

    _owner = "Fabric"

    @takes_fields_of(FabricArguments)
    def __init__(self, given: FabricArguments) -> None:
        super().__init__(
            given.accelerator,
            given.parallel_devices,
            given.cluster_environment,
            given.checkpoint_io or AtomicCheckpointIO(),
            given.precision,
        )
        self.options: Options = in_own_loop(given)
        self._num_nodes = 1
        self._control: Control | None = None
        self._monitor: FailureMonitor | None = None
        self._lazy: LazyEngine | None = None
        self._entry: dict[str, Any] = {}

    # -- processes ----------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Samplers divide the data among pipelines; None for a single one, which keeps the user's sampler."""
        if self.num_pipelines == 1:
            return None
        return {"num_replicas": self.num_pipelines, "rank": self._joined.pipeline}

    def setup_environment(self) -> None:
        """Initialise the device, the process group, and the watch over the other ranks, which ends with the process."""
        super().setup_environment()
        self.set_world_ranks()
        if self.cluster_environment is None:
            raise ConfigError("The strategy has no cluster environment yet; it gets one from Fabric.")
        if self._monitor is None:
            self._monitor = self._monitored()
            self._meet(self.cluster_environment, self._monitor)
            atexit.register(self._stop_watch)

    def _stop_watch(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.stop()

    def teardown(self) -> None:
        """Make the module complete on rank 0, and end the watch; all ranks call this after their loop."""
        if self._lazy is not None:
            self._lazy.end(complete=True)
        self._stop_watch()
        super().teardown()

    # -- module, optimizers and data ----------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build modules on the CPU (`empty_init`: without memory); each rank keeps only its part."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta" if empty_init else "cpu"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: each rank moves its part, once it is known."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Keep a module, which is divided at its first call.

        Raises:
            ConfigError: there is one already.
        """
        if self._lazy is not None and self._lazy.module is not module:
            raise ConfigError(
                f"fabric.setup was given a second module ({type(module).__name__}), but one plan has the stages of one "
                "module. Make both submodules of one, with a forward for each use, and set that up."
            )
        self._lazy = self._lazy or LazyEngine(
            module,
            self.options,
            control=self._joined,
            precision=self.precision,
            device=self.root_device,
            num_nodes=self.num_nodes,
        )
        return PipelinedModule(module, self._call)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Keep an optimizer of the undivided module.

        Raises:
            ConfigError: the module is divided already, or there is none.
        """
        if self._lazy is None or self._lazy.engine is not None:
            raise ConfigError(
                "fabric.setup_optimizers has to come after fabric.setup_module, and before the first call of the "
                "module, which divides the parameters. Use model, optimizer = fabric.setup(model, optimizer)."
            )
        self._lazy.optimizers.append(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        """A loader whose mini-batches all ranks of a pipeline get from its first one."""
        control = self._joined
        divide_samples(dataloader, control.mesh, {"num_replicas": self.num_pipelines, "rank": control.pipeline})
        if control.num_devices == 1:
            return dataloader
        return MirroredLoader(dataloader, control, Mirror(control, self.root_device))

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._prepared.call(args, kwargs)

    # -- a step -------------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward, on all ranks; afterwards gradients are complete, and added to those before."""
        engine = self.engine
        if engine is None:
            super().backward(tensor, module, *args, **kwargs)
            return
        with engine.whole.reducing():
            super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale an optimizer's gradients by the norm over all stages; returns it.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        self.precision.unscale_gradients(optimizer)
        engine = self._divided
        norm = engine.optimizer_norm(optimizer, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {float(norm)}.")
        engine.scale_gradients(optimizer, max_norm, norm)
        return norm

    # -- what ranks tell each other -----------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the pipelines: the ranks of one pipeline have equal values."""
        return self._reduced(tensor, group, reduce_op)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write the objects of a state, undivided, as one file. All ranks call this together."""
        super().save_checkpoint(path, {**state, **entry_for(self.engine)}, *args, **kwargs)
        self.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file of this strategy or of any other; every rank keeps its part."""
        load = partial(super().load_checkpoint, path, strict=strict, weights_only=weights_only)
        if not isinstance(state, dict) or not state:
            return load(state)
        rest: dict[str, Any] = loaded_into(state, self.engine, load)
        self._resume(entry_of(rest, path))
        return {name: value for name, value in rest.items() if name != KEY}

    def _resume(self, entry: dict[str, Any]) -> None:
        """Continue the random streams of the run that wrote a checkpoint."""
        if self._lazy is not None and "seed" in entry:
            self._lazy.resume(entry.get("step", 0), entry["seed"])

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The undivided module's state; complete on rank 0. All ranks call this together."""
        engine = self.engine
        return super().get_module_state_dict(undivided(module)) if engine is None else engine.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a state of the undivided module."""
        if self.engine is None:
            super().load_module_state_dict(undivided(module), state_dict, strict)
        else:
            self.engine.load_state_dict(state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The undivided optimizer's state; complete on rank 0. All ranks call this together."""
        engine = self.engine
        return super().get_optimizer_state(optimizer) if engine is None else engine.optimizer_state_dict(optimizer)

    # -- its parts ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the module.

        Raises:
            PlanError: there is none before the first call.
        """
        if self.engine is None:
            raise PlanError("There is no plan yet; it is made at the first call of the module.")
        return self.engine.plan

    @property
    def engine(self) -> Engine | None:
        return None if self._lazy is None else self._lazy.engine

    @property
    def _divided(self) -> Engine:
        if self.engine is None:
            raise ConfigError("There are no gradients yet: call the module that fabric.setup returned first.")
        return self.engine

    @property
    def _prepared(self) -> LazyEngine:
        if self._lazy is None:
            raise ConfigError("No module was set up; use model, optimizer = fabric.setup(model, optimizer).")
        return self._lazy

    @property
    def _joined(self) -> Control:
        if self._control is None:
            raise ConfigError("There are no processes yet: call fabric.launch() before fabric.setup.")
        return self._control
