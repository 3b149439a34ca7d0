"""The subject of `gpp-plan`: a step of a configured model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_gpp._compat.lightning import attach_data
from lightning_gpp._compat.lightning_module import set_device_mesh
from lightning_gpp._compat.torch import imitated_processes, pytree
from lightning_gpp.capture import Capture
from lightning_gpp.capture.calls import find_calls
from lightning_gpp.cli.configured import built, refusal
from lightning_gpp.costs.model import Footprint
from lightning_gpp.errors import CaptureError, ConfigError, ShapeError
from lightning_gpp.strategy.checks import runs_whole
from lightning_gpp.strategy.data import peek, transferred
from lightning_gpp.strategy.optimization import stand_ins
from lightning_gpp.strategy.steps import CONTEXTS
from lightning_gpp.training.data.batches import outline
from lightning_gpp.training.divided.parallel_regions import captured_apart
from lightning_gpp.training.divided.tensor_parallel import TensorParallel, check_divided, dividing
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.measured.machine import footprint_of
from lightning_gpp.training.options import Context, Options
from lightning_gpp.training.planner import captured_step
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from lightning_gpp.training.whole.whole_step import capture_found, check_whole, left_open, why_whole

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The captured step of a configured model.

    `step`: what is planned: the step itself, or in a run that does not train the same without a backward. `divided`:
    the dimension along which the processes of a device divide each parameter, by name. `whole`: whether the training
    step runs as a whole.
    """

    captured: Capture
    step: Capture
    model: L.LightningModule
    footprint: Footprint
    notes: tuple[str, ...] = ()
    divided: Mapping[str, int] | None = None
    whole: bool = False


def captured(config: DictConfig, options: Options) -> Step:
    """The configured step on the first mini-batch, under the configured precision.

    The module has no memory for its parameters, unless its code needs their values.

    Raises:
        ConfigError: there is no such step.
    """
    if config.step not in _LOADERS:
        raise ConfigError(f"step={config.step}; choose one of {', '.join(_LOADERS)}.")
    if options.costs == "measured":
        raise ConfigError(
            "strategy.costs=measured times the model in its training run: gpp-train writes the plan that it finds into "
            "the run folder. For gpp-plan choose strategy.costs=roofline."
        )
    try:
        return _captured(config, options, partial(torch.device, "meta"))
    except Exception:  # the user's code computes with the values of its parameters, or it is wrong anyway
        return _captured(config, options, nullcontext)


def _captured(config: DictConfig, options: Options, placed: Callable[[], AbstractContextManager[Any]]) -> Step:
    """The step.

    Args:
        placed: context in which the module is built; on the meta device its parameters take no memory.
    """
    trainer = _quiet_trainer(config.trainer.precision)
    datamodule = built(config.data, L.LightningDataModule)
    with placed():
        model: L.LightningModule = built(config.model, L.LightningModule)
    _check_methods(model, config.step)
    trainer.precision_plugin.convert_module(model)
    attach_data(trainer, model, datamodule)
    batch = first_batch(datamodule, config.step) if options.example_batch is None else options.example_batch
    with placed():
        model.setup(_LOADERS[config.step][0])
    batch = transferred(trainer, batch, CPU)
    context = getattr(trainer.precision_plugin, CONTEXTS[config.step])
    record = partial(captured_step, model, outline(batch), config.step, options, context, CPU, None)
    with _members(model, options.members) as dividing:
        with placed(), dividing as found:
            model.configure_model()
        parallel = found[0]
        optimizers, notes = _optimizers(model, trainer)
        divided = partial(captured_apart, record, parallel, model, context, 1, lambda find: find())
        trains = config.step == TRAINING
        step, whole = _training_step(model, batch, options, context, divided) if trains else (divided(), "")
    check_divided(options.members, parallel)
    return Step(
        captured=step,
        step=step,
        model=model,
        footprint=footprint_of(optimizers, str(config.trainer.precision)),
        notes=(*notes, *([whole] if whole else []), *step.notes),
        divided=None if parallel is None else parallel.cut,
        whole=bool(whole),
    )


def _check_methods(model: L.LightningModule, step: str) -> None:
    """Refuse a module without the step, or one that is trained without optimizers.

    Raises:
        ConfigError: with the method that is missing.
    """
    needed = {TRAINING: (TRAINING, "configure_optimizers"), "predict_step": ()}  # which Lightning has itself
    for method in needed.get(step, (step,)):
        if not is_overridden(method, model):
            raise ConfigError(f"{type(model).__name__} has no method {method}, which step={step} needs. Add it.")


def _training_step(
    model: L.LightningModule, batch: Any, options: Options, context: Context, divided: Callable[[], Capture]
) -> tuple[Capture, str]:
    """The captured training step, and a note if it runs as a whole; `divided` captures it for micro-batches."""
    example = outline(batch)
    joint = partial(_joint, model, example, options, context)
    if runs_whole(model, options):
        check_whole(options, steps_itself=not model.automatic_optimization)
        return joint(), "The training step runs as a whole, on all ranks, and each of its network calls is pipelined."
    try:
        return divided(), ""
    except (CaptureError, ShapeError) as error:
        refused = error
    if left_open(options):
        with suppress(CaptureError, ShapeError, ConfigError):
            return joint(), why_whole(refused)
    raise refused


def _joint(model: L.LightningModule, example: Any, options: Options, context: Context) -> Capture:
    found = find_calls(model, example, context=context, device=CPU, stand_ins=partial(stand_ins, model))
    return capture_found(model, found, example, options, context, CPU)


@contextmanager
def _members(
    model: L.LightningModule, degree: int
) -> Iterator[AbstractContextManager[Sequence[TensorParallel | None]]]:
    """Inside, the module has the mesh of a device's processes, which are imitated, to divide itself in the context."""
    if degree == 1:
        yield nullcontext([None])
        return
    with imitated_processes(degree):
        names = ("data_parallel", "tensor_parallel")
        set_device_mesh(model, init_device_mesh("cpu", (1, degree), mesh_dim_names=names))
        yield dividing(model, range(degree))


def _optimizers(model: L.LightningModule, trainer: L.Trainer) -> tuple[Sequence[Optimizer], tuple[str, ...]]:
    """The optimizers that `configure_optimizers` returns, in any form; if it needs a run, none and a note.

    Raises:
        ConfigError: it returns something else.
    """
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True  # makes the number of steps available
    try:
        trainer.strategy.setup_optimizers(trainer)
    except MisconfigurationException as error:
        raise refusal(f"{type(model).__name__}.configure_optimizers", error) from error
    except Exception as error:  # the user's code, outside the run that it is written for
        cause = f"{type(error).__name__}: {error}"
        return (), (
            f"The memory of Adam is assumed for the optimizer: configure_optimizers failed outside a run ({cause}).",
        )
    for optimizer in trainer.optimizers:
        OptimizerIndex(optimizer, model)  # as in training, it refuses parameters that are not the module's
    return trainer.optimizers, ()


_LOADERS: Final = {
    TRAINING: ("fit", "train_dataloader"),
    "validation_step": ("validate", "val_dataloader"),
    "test_step": ("test", "test_dataloader"),
    "predict_step": ("predict", "predict_dataloader"),
}
"""Steps that can be planned, with the stage of set-up and the method for the loaders of each."""


def first_batch(datamodule: L.LightningDataModule, step: str = TRAINING) -> Any:
    """The first mini-batch for a step, in the structure of its loaders; for evaluation, from the first loader.

    Raises:
        ConfigError: the data have no loader for the step, or one without mini-batches, or the first one fails.
    """
    stage, method = _LOADERS[step]
    datamodule.prepare_data()
    datamodule.setup(stage)
    try:
        loaders = getattr(datamodule, method)()
    except MisconfigurationException as error:
        raise ConfigError(f"step={step}: {type(datamodule).__name__} has no {method}.") from error
    if step != TRAINING and isinstance(loaders, list | tuple):
        loaders = loaders[0]
    name = f"{type(datamodule).__name__}.{method}"
    batch = pytree.tree_map(peek, getattr(loaders, "iterables", loaders))
    if batch is None:
        raise ConfigError(
            f"{name} has no mini-batch, so there is nothing to plan for: its dataset is empty, or has fewer samples "
            "than a batch, and drop_last=True."
        )
    return batch


def _quiet_trainer(precision: Any) -> L.Trainer:
    """A trainer with which module, data and precision can be asked; it runs nothing.

    Raises:
        ConfigError: Lightning has no such precision.
    """
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # there are no processes to start
    try:
        return L.Trainer(
            accelerator="cpu", devices=1, precision=precision, max_epochs=1, logger=False, enable_checkpointing=False
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise refusal(f"trainer.precision={precision}", error) from error
