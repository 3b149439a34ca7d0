"""Lightning's view of pipeline parallelism: processes, communication between ranks, steps and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp._compat.lightning_module import set_device
from lightning_gpp.checkpoints.layout import entry_of
from lightning_gpp.checkpoints.stored import StoredValues
from lightning_gpp.errors import CheckpointError, ConfigError, PlanError, show_elsewhere
from lightning_gpp.failure.monitor import INTERRUPTED
from lightning_gpp.option import documents, takes_fields_of
from lightning_gpp.plan import Plan
from lightning_gpp.replaced import replaced
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.simulation import Period, Timeline
from lightning_gpp.strategy.checkpoints import saved_by_all
from lightning_gpp.strategy.data import Taken, distribute
from lightning_gpp.strategy.guard import Preempted
from lightning_gpp.strategy.ranks import Arguments, RanksStrategy
from lightning_gpp.strategy.run import Run
from lightning_gpp.strategy.steps import SKIPPED, Steps, once
from lightning_gpp.training.divided.tensor_parallel import TensorParallel, check_first_run, dividing
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.measured.machine import simulated
from lightning_gpp.training.measured.trace import period_of, write_report
from lightning_gpp.training.options import Options
from lightning_gpp.training.states import load_state
from lightning_gpp.training.tensors.joining import disconnect
from lightning_gpp.training.tensors.parameters import move

log = logging.getLogger(__name__)


@documents(Options)
class GPPStrategy(RanksStrategy):
    """Train an unmodified LightningModule as a pipeline of stages that form a directed acyclic graph.

    Raises:
        ConfigError: a setting cannot work, whatever the model.
        PlanError: the plan's file cannot be read.
    """

    strategy_name = "gpp"

    @takes_fields_of(Arguments)
    def __init__(self, given: Arguments) -> None:
        super().__init__(given)
        self._known: Plan | None = None
        self._resumed: dict[str, Any] = {}
        self._stored: StoredValues | None = None
        self._accumulating = False
        self._parallel: TensorParallel | None = None
        self._divided_on: Mesh | None = None

    # -- set-up and end -----------------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module of a new run."""
        before = self._run if self._run is not None and self._run.module is model else None
        self._known, self._parallel = (None, None) if before is None else (self.plan, self._parallel)
        self._trained = None if before is None else before.saved
        super().connect(model)
        self._run, self._resumed, self._stored = None, {}, None

    def process_dataloader(self, dataloader: object) -> object:
        """The data loader where the user's step runs, elsewhere one of the same length without data."""
        if self._control is None:
            return dataloader
        return distribute(dataloader, self._control, self.distributed_sampler_kwargs)

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the module, make a plan and place parameters (in evaluation, only at the first mini-batch)."""
        if self.accelerator is None or self.model is None or self._control is None:
            raise ConfigError("The strategy was set up without an accelerator, a module or processes; use a Trainer.")
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        set_device(self.model, self.root_device)
        self._run = Run(
            trainer,
            self,
            control=self._control,
            options=self.options,
            resumed=self._resumed,
            stored=self._stored,
            known=self._known,
            parallel=self._parallel,
            trained=None if trainer.state.fn == TrainerFn.FITTING else self._trained,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self._run.set_up_training()
        self._run.attach()
        self.setup_precision_plugin()

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other ranks; from now on this rank waits for nobody, unless all raise it."""
        if self._end is exception:
            return
        self._end, self._together = exception, isinstance(exception, Preempted)
        if self._monitor is not None and not self._together:
            refused = isinstance(exception, MisconfigurationException)  # its sentence says all
            told = ConfigError(str(exception)).with_traceback(exception.__traceback__) if refused else exception
            self._together = self._monitor.report(told)
            if (self._together and self.global_rank) or self._monitor.has_shown(told):
                show_elsewhere(exception)

    def teardown(self) -> None:
        """Detach from the module; rank 0's module is complete again, unless the ranks stopped at different points.

        Raises:
            SystemExit: for a signal that came after the last step, or with the exit code of Ctrl-C.
        """
        if self._end is None and self._guard is not None:
            self._guard.boundary(ended=True)
        if not self._failed:
            self._checkpoints.end()
        if self._run is not None:
            self._run.detach(complete=not self._failed and not isinstance(self._end, Preempted))
        self.precision_plugin.teardown()
        for part in (self.cluster_environment, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()
        if self._monitor is not None:
            self._monitor.stop()
        if self._failed and self._control is not None:
            disconnect(self._control)
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

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Run the module's configure_model; what it divides among the members of a device is taken out again."""
        module, control = self.lightning_module, self._control
        mesh = None if control is None else control.mesh.device_mesh(self.root_device.type)
        if module is None or control is None or mesh is None:
            yield
            return
        if self._parallel is not None and self._divided_on is control.mesh:
            with replaced(module, "configure_model", lambda: None):  # the division of the run before is known
                yield
            return
        check_first_run(module, control)
        with dividing(module, control.mesh.members) as found:
            yield
        self._parallel, self._divided_on = found[0], control.mesh

    # -- steps --------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, and tell the ranks of the pipeline its size and form; they get a placeholder."""
        run = self._run
        if run is None or not isinstance(batch, Taken):
            return super().batch_to_device(batch, device, dataloader_idx)
        if run.reading.active:
            batch = run.reading.next()
        elif run.control.loads:
            batch = super().batch_to_device(batch.batch, device, dataloader_idx)
        else:
            batch = None
        return run.share(batch) if run.steps.whole else run.announced(batch)

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
        self._running.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forwards and backwards of a mini-batch; returns the detached loss, on all ranks of the pipeline.

        A step as a whole runs on all ranks, and its result is its own.
        """
        if self._training.trains_whole:
            with self._training.whole_step(self._steps.module.trainer.accumulate_grad_batches):
                result = super().training_step(*args, **kwargs)
        else:
            result = self._steps.train([*args, *kwargs.values()], last=not self._accumulating)
        return SKIPPED if result is None and self._running.skips_together else result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it; a step as a whole runs on all ranks."""
        return self._steps.evaluate("validation_step", [*args, *kwargs.values()])

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it."""
        return self._steps.evaluate("test_step", [*args, *kwargs.values()])

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the user's step on the rank that runs it; None elsewhere."""
        return self._steps.evaluate("predict_step", [*args, *kwargs.values()])

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the hooks around backward. The step has computed the gradients; here they are reduced over ranks."""
        module = self.lightning_module
        if module is None:
            raise ConfigError("The strategy has no module; use trainer.fit(model).")
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._training.trains_whole:
            with self._training.whole.reducing():
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            self._training.check_finite(closure_loss, last=not self._accumulating)
        else:
            self._steps.gradients.give_back()
            if not self._accumulating:
                self._training.sum_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer, which evaluates the closure once, as each device steps its own part."""
        if not self._training.trains_whole or self._training.plan.num_devices > 1:
            closure = once(closure)
        with self._training.divided_optimizers():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

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
    def _steps(self) -> Steps:
        return self._running.steps

    @property
    def _training(self) -> Engine:
        engine = self._steps.engine
        if engine is None:
            raise ConfigError("A training step was run outside of trainer.fit.")
        return engine

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all stages, for hooks: all ranks call this together, and get the same."""
        return self._training.grad_norm(norm_type)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _saved(self) -> Engine | None:
        return None if self._run is None else self._run.saved

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full module's state, under original names; complete on global rank 0. All ranks must call it."""
        engine = self.engine or self._saved  # an evaluation may have placed parameters anew
        if engine is None or self._failed:
            return super().lightning_module_state_dict()
        self._begin("collecting the state for a checkpoint")
        self._running.hooks.begin_saving()
        with saved_by_all(ended=self._monitor is None):
            return engine.state_dict(sharded=self._checkpoints.sharded(engine))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The undivided optimizer's state in the user's indexing; complete on global rank 0. All ranks must call it."""
        if self._run is None:
            return super().optimizer_state(optimizer)
        if self._failed:  # the others have ended, and nothing is written
            return self._run.optimizer_state(optimizer, alone=True)
        return self._run.optimizer_state(optimizer, sharded=self._checkpoints.sharded(self._saved))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; after a failure of this rank, which has only its part, do nothing."""
        if self._failed and self.world_size > 1:
            log.warning("No checkpoint is written to %s: this rank has failed, and the others have ended.", filepath)
            return
        self._begin(f"saving {filepath}")
        if self._run is not None:
            self._run.hooks.end_saving()
        self._checkpoints.save(checkpoint, filepath, storage_options, self._saved, first=self.is_global_zero)
        self._end_phase()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before the one that replaces it is there."""
        if self.is_global_zero:
            self._checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of this strategy, under any plan, or of plain Lightning."""
        self._begin(f"reading {checkpoint_path}")
        self._checkpoints.wait()
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._end_phase()
        if "state_dict" not in checkpoint:
            remedy = "If it has weights alone, load them before training: model.load_state_dict(torch.load(path))."
            raise CheckpointError(f"{checkpoint_path} (ckpt_path) is no checkpoint: it has no 'state_dict'. {remedy}")
        self._resumed = {
            **entry_of(checkpoint, checkpoint_path),
            "fit_loop": checkpoint.get("loops", {}).get("fit_loop"),
        }
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state dict; once parameters are placed, keep this rank's part.

        From a folder, parameters without memory are read when they are placed.
        """
        if self.lightning_module is None:
            raise ConfigError("The strategy has no module to load a checkpoint into; use a Trainer.")
        state = checkpoint["state_dict"]
        self._stored = state if isinstance(state, StoredValues) else None
        load = partial(load_state, self.lightning_module) if self.engine is None else self.engine.load_state_dict
        load(state, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizers' states."""
        self._running.load_optimizers(checkpoint["optimizer_states"])

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None before there is one."""
        return None if self.engine is None else self.engine.plan

    def timeline(self) -> Timeline:
        """The simulated timeline of a mini-batch under the plan.

        Raises:
            PlanError: there is no plan yet.
        """
        engine = self._planned()
        return simulated(engine.plan, engine.graph, engine.machine(), self.num_pipelines)

    def period(self) -> Period | None:
        """The simulated steady state of training without a flush; None if the pipeline flushes, or is one device.

        Raises:
            PlanError: there is no plan yet.
        """
        return period_of(self._planned(), self.num_pipelines)

    def report(self, path: str | Path) -> None:
        """Write plan, timelines and memory as one HTML file, on global rank 0; also after `trainer.fit`.

        With `trace=True`, after the run, the measured timeline is drawn below the simulated one.

        Args:
            path: the file.

        Raises:
            PlanError: there is no plan yet.
        """
        if self.global_rank == 0:
            write_report(path, self._planned(), self.num_pipelines, self._steps.trace)

    def _planned(self) -> Engine:
        if self.engine is None:
            raise PlanError("There is no plan yet; it is made when trainer.fit starts, or at the first mini-batch.")
        return self.engine
