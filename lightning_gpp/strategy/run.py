"""One run of a trainer (fit, validate, test or predict), with all that it attaches to module and trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from lightning_gpp._compat import lightning as _compat
from lightning_gpp.capture.batch import samples_in
from lightning_gpp.checkpoints.stored import StoredValues
from lightning_gpp.errors import CheckpointError, GPPError
from lightning_gpp.plan import Plan
from lightning_gpp.replaced import Replaced
from lightning_gpp.strategy.ahead import ReadAhead
from lightning_gpp.strategy.batch_readers import BATCH, BatchReaders
from lightning_gpp.strategy.checks import (
    check_callbacks,
    check_module,
    check_processes,
    copies_of,
    runs_whole,
)
from lightning_gpp.strategy.data import Placeholder, as_before, is_moved_by_reading, peek, transferred
from lightning_gpp.strategy.hooks import Hooks
from lightning_gpp.strategy.metrics import MetricStates
from lightning_gpp.strategy.processes import given_seed
from lightning_gpp.strategy.steps import LightningHost, SharedResult, Steps, step_of
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.data.loaders import warn_of_others
from lightning_gpp.training.divided.tensor_parallel import TensorParallel, check_copies, check_divided
from lightning_gpp.training.engine import CPU, Engine
from lightning_gpp.training.host import Job
from lightning_gpp.training.measured.machine import footprint_of
from lightning_gpp.training.measured.trace import TraceFile
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.options import Options
from lightning_gpp.training.setup import agreed_seed, set_up
from lightning_gpp.training.tensors.joining import check_alike, facts_of_schedules
from lightning_gpp.training.tensors.parameters import move
from lightning_gpp.training.updates.gradients import check_scaled
from lightning_gpp.training.whole.whole_step import check_whole


class Run:
    """Sets up the engine of one run, and connects it with Lightning.

    Args:
        trainer: the trainer of the run.
        strategy: the trainer's strategy, which has the optimizers.
        control: the side channel of this rank.
        options: options of the strategy.
        resumed: the entry of the checkpoint that the run resumes from, and its `fit_loop`; empty if it does not.
        stored: the state dict of that checkpoint if it is a folder.
        known: the plan of an earlier run of the module, which evaluation keeps.
        parallel: the division of the module among the processes of a device.

    Raises:
        ConfigError: module, precision or callbacks cannot work in stages.

    Attributes:
        skips_together: whether a training step that returns None does so on all ranks.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        strategy: ParallelStrategy,
        *,
        control: Control,
        options: Options,
        resumed: Mapping[str, Any],
        stored: StoredValues | None = None,
        known: Plan | None = None,
        parallel: TensorParallel | None = None,
        trained: Engine | None = None,
    ) -> None:
        self._trained_before = trained
        self.trainer, self.strategy, self.control = trainer, strategy, control
        self.module: pl.LightningModule = trainer.lightning_module
        self.precision = strategy.precision_plugin
        fitting = trainer.state.fn == TrainerFn.FITTING
        whole = fitting and runs_whole(self.module, options)
        check_module(self.module, whole or not fitting)
        if whole:
            check_whole(options, steps_itself=not self.module.automatic_optimization)
        if fitting and getattr(self.precision, "scaler", None) is not None:
            check_scaled(options)
        check_callbacks(trainer, control.num_devices)
        check_processes(trainer, control.num_processes)
        device = strategy.root_device
        host = self._host = LightningHost(self.module, self.precision)
        seeds = options.seed, resumed.get("seed"), given_seed()
        self.job = Job(
            module=self.module,
            control=control,
            options=options,
            device=device,
            seed=agreed_seed(next((seed for seed in seeds if seed is not None), None), control),
            num_nodes=trainer.num_nodes,
            host=host,
            stored=stored,
            known=None if fitting else known,
            whole=whole,
            parallel=parallel,
        )
        check_divided(control.num_members, parallel)
        self.incoming = Incoming(self.module, control, options.batch_dims)
        self._readers = BatchReaders(trainer, control, device)
        self._metrics = MetricStates(self.module, control, device)
        shared = self._readers, self._metrics
        self.steps = Steps(self.module, control, host, self.incoming, device, self._set_up_evaluation, *shared)
        self.reading = ReadAhead(trainer, self.incoming, device)
        self._num_steps, self._pipeline = int(resumed.get("step", 0)), dict(resumed.get("pipeline", {}))
        self._mini_batches, self._loop = int(resumed.get("mini_batches", 0)), resumed.get("fit_loop")
        self._optimizers: Sequence[Optimizer] = ()
        self.hooks = Hooks(trainer, control, device, self.steps, lambda: self._trained)
        self._replaced = Replaced()
        self._example_input: Any = None
        self.skips_together = False

    @property
    def engine(self) -> Engine | None:
        """The engine that trains or evaluates; None before it is set up."""
        return self.steps.engine

    @property
    def saved(self) -> Engine | None:
        """The engine whose optimizers a checkpoint has: in and after an evaluation that of the training before."""
        return self._trained_before or self.engine

    # -- set-up -------------------------------------------------------------------------------------------------------

    def set_up_training(self) -> None:
        """Configure the optimizers on the full module, plan (they take memory), then keep this rank's part of it."""
        now = self.control.num_pipelines
        if self.control.first:
            warn_of_others(self._mini_batches or now, now)
        batch = self._example()
        has_data = self.control.broadcast(batch is not None)
        self.strategy.setup_optimizers(self.trainer)
        self._optimizers = self.strategy.optimizers
        if not has_data:
            return
        self.steps.engine = set_up(
            self.job,
            self.incoming,
            batch,
            optimizers=self._optimizers,
            footprint=footprint_of(self._optimizers, str(self.precision.precision)),
            num_steps=self._num_steps,
        )
        self.job = self.steps.engine.job  # which may run the step as a whole
        self.steps.engine.load_pipeline_state_dict(self._pipeline)
        self._pipeline = {}
        if self.job.options.trace:
            self.steps.trace = TraceFile(self.trainer.default_root_dir, self.control)
        copies = copies_of(self.module, getattr(self.trainer, "callbacks", ()))
        check_copies(self.job.parallel, copies)
        for copied in copies:
            self.steps.engine.divide(copied)
        self.skips_together = self.control.num_pipelines == 1 and self.module.automatic_optimization
        if self.skips_together:
            self.trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls = SharedResult

    def _set_up_evaluation(self, step: str, batch: Any) -> Engine:
        return set_up(self.job, self.incoming, batch, step=step, num_steps=self._num_steps)

    def _example(self) -> Any:
        """A mini-batch on rank 0, as the step will see it; None on other ranks, and without training data."""
        given = self.job.options.example_batch
        wanted = given is None
        look = peek if wanted and self.control.first else None
        moved = is_moved_by_reading if wanted else (lambda _: False)
        peeked = _compat.first_training_batch(self.trainer, look, moved, self._loop)
        batch = peeked if given is None else given
        if not self.control.first or batch is None:
            return None
        data: Any = getattr(self.trainer, "datamodule", None)
        with isolate_rng(), as_before(vars(self.module), data):
            return transferred(self.trainer, batch, self.job.device)

    def share(self, batch: Any) -> Any:
        """A mini-batch of a step as a whole, on all ranks of the pipeline; used only on the rank that loads it."""
        shared = self._trained.whole.share(batch)
        self.incoming.batch_size = samples_in(shared)
        return shared

    def announced(self, batch: Any) -> Any:
        """Tell the ranks of the pipeline the size and form of a mini-batch; returns what hooks get on this rank.

        Ranks that do not run the step have a placeholder, unless hooks of callbacks read the mini-batch.
        """
        if self.control.runs_step:
            batch = self.job.in_device(batch)
        if not self.reading.announce(batch):
            return None
        if BATCH in self._readers.taken.get(step_of(self.trainer), ()):
            return self._readers.everywhere(batch)
        if not self.control.runs_step:
            batch = self._host.placeholder = Placeholder(torch.empty(self.incoming.batch_size, 0))
        return batch

    # -- attached -----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach to hooks, metrics, clipping and the ends of epochs."""
        self._metrics.attach()
        _compat.on_epoch_end_reached(self.trainer, self._end_of_epoch, self._replaced)
        if self.engine is not None:
            self._replaced.put(self.precision, "clip_grad_by_norm", self._clip)  # over all stages
            self._replaced.put(self.precision, "clip_grad_by_value", self._clip_values)
            if self.steps.scale is not None:
                self.steps.scale.attach()
        if self.control.num_devices > 1:
            self._readers.attach()
        self.hooks.attach(trains=self.engine is not None, whole=self.job.whole)
        self.reading.attach()
        self._example_input = self.module.example_input_array
        self.module.example_input_array = None  # summaries and loggers would run the full module with it on one rank

    def detach(self, complete: bool) -> None:
        """Undo `attach`; move the module to the CPU, and after a normal end (`complete`) all of it to rank 0."""
        self.hooks.detach()
        self._readers.detach()
        self._metrics.detach()
        self.reading.detach()
        self._replaced.restore()
        if self.steps.scale is not None:
            self.steps.scale.detach()
        if self._example_input is not None:
            self.module.example_input_array = self._example_input
        if self.engine is None:
            move(self.module, CPU)
            return
        if complete and self.steps.trace is not None:
            self.steps.trace.finish(self.engine)
        (self.engine.release if complete else self.engine.abandon)()

    # -- loops --------------------------------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Resume loaders at their positions; read mini-batches before their turn if stages start them before it."""
        _compat.begin_validation_anew(self.trainer)
        if self.engine is not None and self.job.options.weights != SYNCHRONOUS:
            self.reading.train(self.engine.ahead)

    def begin_evaluation(self, step: str) -> None:
        """Read mini-batches before their turn; the engine may be set up at the first one. Hooks may read metrics."""
        self._metrics.share()
        if self._reads_ahead:
            self.reading.evaluate(lambda: 0 if self.engine is None else self.engine.ahead(step))

    def end_evaluation(self) -> None:
        """Leave the loop."""
        if self._reads_ahead:
            self.reading.end()

    @property
    def _reads_ahead(self) -> bool:
        """True if mini-batches of an evaluation may be read before their turn."""
        divided = self.control.num_devices > 1 or self.job.options.weights != SYNCHRONOUS
        return divided and self.job.parallel is None

    def _end_of_epoch(self) -> None:
        """Give all ranks the states of metrics; in training, compare the hyperparameters that schedules have set.

        Raises:
            ConfigError: the ranks have other ones, as a schedule depends on what only some of them have.
        """
        self._metrics.share()
        step = step_of(self.trainer)
        if self.control.num_devices > 1 and self.engine is not None and not self.engine.runs_whole(step):
            self.steps.mirrored.end_epoch()
        if self.trainer.training and self.control.num_processes > 1 and self.job.options.weights == SYNCHRONOUS:
            check_alike(facts_of_schedules(map(_plain, self._optimizers)), self.control.everyone)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer, *, sharded: bool = False, alone: bool = False) -> dict[str, Any]:
        """The undivided optimizer's state; complete on rank 0, or, if `sharded`, what this rank saves.

        `alone`: that of this rank's part, without the others.
        """
        plain, engine = _plain(optimizer), self.saved
        if engine is None or not engine.divides(plain):
            return plain.state_dict()
        return engine.part_of_optimizer(plain) if alone else engine.optimizer_state_dict(plain, sharded=sharded)

    def load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's part of the optimizers' states.

        Raises:
            CheckpointError: the states are of other optimizers.
        """
        if len(states) != len(self._optimizers):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, configure_optimizers gave "
                f"{len(self._optimizers)}. Resume with the optimizers that wrote it, or load only the weights."
            )
        for optimizer, state in zip(self._optimizers, states, strict=True):
            if self.engine is None:  # there are no data
                optimizer.load_state_dict(dict(state))
            else:
                self.engine.load_optimizer_state_dict(optimizer, state)

    def _clip(self, optimizer: Optimizer, max_norm: float) -> None:
        self._trained.clip_grad_norm(_plain(optimizer), max_norm)

    def _clip_values(self, optimizer: Optimizer, most: float) -> None:
        """Clip the gradients of this rank, if it has any: its modules may be frozen, and torch takes no empty list."""
        parameters = self._trained.stepped_here(_plain(optimizer))
        if given := [parameter for parameter in parameters if parameter.grad is not None]:
            clip_grad_value_(given, most)

    @property
    def _trained(self) -> Engine:
        if self.engine is None:
            raise GPPError("There is no training run whose optimizers could be loaded.")
        return self.engine


def _plain(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
