"""One run of a trainer (fit, validate, test or predict): what is attached to module and trainer for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.errors import CheckpointError, GPPError
from lightning_gpp.plan import Plan
from lightning_gpp.strategy.checks import check_callbacks, check_module, check_precision
from lightning_gpp.strategy.data import peek
from lightning_gpp.strategy.hooks import SharedHooks
from lightning_gpp.strategy.metrics import MetricStates
from lightning_gpp.strategy.processes import agreed_seed
from lightning_gpp.strategy.reporting import TraceFile, announce_plan
from lightning_gpp.training.checkpoint import make_whole, saved_here, whole_optimizer_state
from lightning_gpp.training.control import Control
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.machine import footprint_of
from lightning_gpp.training.optimizers import OptimizerIndex, clip_by_global_norm
from lightning_gpp.training.parameters import move, tensors_of
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.training.replicas import Layout, Replicas
from lightning_gpp.training.shards import whole_states

if TYPE_CHECKING:
    from lightning_gpp.strategy.strategy import GPPStrategy


class Run:
    """Owns the engine of one run and everything that ties it to Lightning.

    Args:
        strategy: its settings, precision and optimizers.
        trainer: of the run.
        control: who this rank is.
        resumed: the entry of the checkpoint that the run resumes from; empty if it does not.
        known: the plan of an earlier run of the module, which evaluation keeps.

    Raises:
        ConfigError: module, precision or callbacks cannot work in stages.
    """

    def __init__(
        self,
        strategy: GPPStrategy,
        trainer: pl.Trainer,
        control: Control,
        resumed: Mapping[str, Any],
        known: Plan | None = None,
    ) -> None:
        self.strategy, self.trainer, self.control = strategy, trainer, control
        self.module: pl.LightningModule = trainer.lightning_module
        self.precision, self.device = strategy.precision_plugin, strategy.root_device
        check_module(self.module)
        check_precision(self.precision)
        check_callbacks(trainer)
        options = strategy.options
        seed = options.seed if options.seed is not None else resumed.get("seed")
        self.engine = Engine(
            self.module,
            control=control,
            options=options,
            precision=self.precision,
            device=self.device,
            seed=agreed_seed(seed, control),
            on_plan=lambda plan: announce_plan(plan, control.num_pipelines),
            known=None if trainer.state.fn == TrainerFn.FITTING else known,
            num_nodes=strategy.num_nodes,
        )
        self.engine.step = int(resumed.get("step", 0))
        self._hooks = SharedHooks(self.module, control, self.engine)
        self._metrics = MetricStates(self.module, control, self.device)
        self._trace = TraceFile(trainer.default_root_dir, control) if options.trace else None
        self._indices: list[OptimizerIndex] = []
        self._replicas: Replicas | None = None
        self._accumulating = False
        self._example_input: Any = None

    # -- set-up -------------------------------------------------------------------------------------------------------

    def set_up_training(self) -> None:
        """Configure the optimizers on the whole module, plan (they take memory), then keep this rank's part of it."""
        batch = self._example()
        if not self.control.broadcast(batch is not None):
            self.strategy.setup_optimizers(self.trainer)
            return
        self.strategy.setup_optimizers(self.trainer)
        self.engine.footprint = footprint_of(self.strategy.optimizers, str(self.precision.precision))
        plan = self.engine.make_plan(TRAINING, batch)
        self._indices = [OptimizerIndex(optimizer, self.module) for optimizer in self.strategy.optimizers]
        layout = Layout(plan=plan, placement=self.engine.place_parameters(), uses=self.engine.uses)
        self._replicas = self.engine.replicas = Replicas(self.module, layout, self._indices, self.control)
        self.engine.renew()
        for index in self._indices:
            _compat.optimizer_to_device(index.optimizer, self.device)
        _compat.install_automatic_optimization(self.trainer)

    def _example(self) -> Any:
        """A mini-batch on rank 0, as the step will see it; None elsewhere, and where there is nothing to train on."""
        given = self.strategy.options.example_batch
        wanted = self.control.rank == 0 and given is None
        peeked = _compat.first_training_batch(self.trainer, peek if wanted else None)
        batch = peeked if given is None else given
        if self.control.rank != 0 or batch is None:
            return None
        with isolate_rng():
            return _compat.transferred(self.module, batch, self.device)

    # -- attached -----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let hooks, metrics, clipping and the ends of epochs take part."""
        if self.control.num_pipelines == 1:  # Lightning takes every process group for data parallelism
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log\\(.*sync_dist=True\\)`")
        self._metrics.attach()
        _compat.on_epoch_end_reached(self.trainer, self._metrics.share)
        if self._indices:
            vars(self.precision)["clip_grad_by_norm"] = self._clip
        if self.control.num_devices > 1:
            self._hooks.attach()
        if not self.control.runs_step:
            _compat.bypass_batch_hooks(self.module)
        self._example_input = self.module.example_input_array
        self.module.example_input_array = None  # summaries and loggers would run the whole module with it on one rank

    def detach(self, complete: bool) -> None:
        """Undo `attach`; bring the module to the CPU, and after a normal end (`complete`) whole to rank 0."""
        self._hooks.detach()
        self._metrics.detach()
        _compat.restore_epoch_end(self.trainer)
        _compat.restore_batch_hooks(self.module)
        vars(self.precision).pop("clip_grad_by_norm", None)
        if self._example_input is not None:
            self.module.example_input_array = self._example_input
        if self._trace is not None:
            self._trace.write()
            if complete:
                self._trace.compare(self.engine)
        sharded = self._replicas is not None and bool(self._replicas.sharded)
        if complete and self._replicas is not None:
            self._end_sharding(self._replicas)
        if complete and self.engine.placement is not None and self.engine.was_whole:
            make_whole(self.module, self.engine.placement, self.control)
        move(self.module, torch.device("cpu"))
        for index in self._indices if complete or not sharded else ():
            _compat.optimizer_to_device(index.optimizer, torch.device("cpu"))

    def _end_sharding(self, replicas: Replicas) -> None:
        """Whole parameters again; the state of the optimizers where a checkpoint takes it from."""
        if replicas.sharding != "fsdp" or self.engine.placement is None:
            return
        held = saved_here(self.engine.placement, self.control)
        shards = tensors_of(self.module)
        states = [whole_states(index.ordered_state(), shards, held) for index in self._indices]
        replicas.restore()
        tensors = tensors_of(self.module)
        for index, state in zip(self._indices, states, strict=True):
            index.put(tensors, state)
        self.engine.renew()

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self, arguments: Sequence[Any]) -> Any:
        """A training step; see `Engine.train`."""
        self._training.begin(last=not self._accumulating)
        result = self.engine.train(arguments, self.trainer.accumulate_grad_batches)
        if self._trace is not None:
            self._trace.add(self.engine)
        return result

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within the context gradients are not summed over ranks."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def synchronise_gradients(self) -> None:
        """Sum gradients over the ranks that hold the same parameters, at the last mini-batch of an optimizer step."""
        if not self._accumulating:
            self._training.finish()

    def publish(self, optimizer: Optimizer) -> None:
        """After a step: all ranks get the parameters that others own."""
        if self._replicas is not None:
            self._replicas.publish(optimizer)

    @property
    def _training(self) -> Replicas:
        if self._replicas is None:
            raise GPPError("Gradients were to be summed without a training run.")
        return self._replicas

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        """In the place of the precision plugin's method: the norm is taken over all stages."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip_by_global_norm(parameters, clip_val, self._training.grad_norm())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state; complete on rank 0."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        placement = self.engine.placement
        for index in self._indices:
            if index.optimizer is plain and placement is not None:
                owned = self._replicas is not None and self._replicas.sharding == "zero1"
                return whole_optimizer_state(index, tensors_of(self.module), placement, self.control, owned)
        return plain.state_dict()

    def load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's part of the optimizers' states.

        Raises:
            CheckpointError: they are of other optimizers.
        """
        if len(states) != len(self._indices):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, configure_optimizers gave "
                f"{len(self._indices)}. Resume with the optimizers that wrote it, or load only the weights."
            )
        for index, state in zip(self._indices, states, strict=True):
            index.load(state, tensors_of(self.module))
            _compat.optimizer_to_device(index.optimizer, self.device)
