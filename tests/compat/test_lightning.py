"""Every private name of Lightning and torchmetrics does what the library needs of it: an upgrade that breaks one fails
here first. Trainers are real ones."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_gpp._compat import lightning as compat
from lightning_gpp._compat import lightning_module
from lightning_gpp.replaced import Replaced

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Line(L.LightningModule):
    """One weight; the loss is the mean of `weight * x`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.events: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Validated(Line):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", 1.0)


class At(L.Callback):
    """Calls a function of the trainer in a hook."""

    def __init__(self, **functions: Callable[[L.Trainer], None]) -> None:
        for hook, function in functions.items():
            setattr(self, hook, lambda trainer, *_, function=function, **__: function(trainer))


def loader(num_batches: int = 2) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(2 * num_batches, 1), batch_size=2)


def fit(module: L.LightningModule, data: Any = None, **hooks: Callable[[L.Trainer], None]) -> L.Trainer:
    trainer = L.Trainer(**QUIET, callbacks=[At(**hooks)])
    trainer.fit(module, data or loader())
    return trainer


# --- data


def test_read_ahead() -> None:
    class Seeing(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.events.append(batch.flatten().tolist())
            return super().training_step(batch, batch_idx)

    def over(loader: Any) -> Iterator[Any]:
        yield from reversed(list(loader))

    module = Seeing()
    data = DataLoader(torch.arange(4.0).reshape(4, 1), batch_size=2)
    fit(module, data, on_train_start=lambda trainer: compat.read_ahead(trainer.fit_loop, over))
    assert module.events == [[2, 3], [0, 1]]


class Countdown:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(3.0, -1, -1).reshape(4, 1, 1))


def test_read_ahead_of_what_was_fetched() -> None:
    seen: list[float] = []

    def over(loader: Any) -> Iterator[Any]:
        for batch, *rest in loader:
            seen.append(float(batch))
            yield batch, *rest

    fit(Line(), Countdown(), on_train_start=lambda trainer: compat.read_ahead(trainer.fit_loop, over))
    assert seen == [3, 2, 1, 0]


def test_loaders_of() -> None:
    found: list[Any] = []
    data = Countdown()
    fit(Line(), data, on_train_start=lambda trainer: found.extend(compat.loaders_of(trainer.fit_loop)))
    assert found == [data]


def test_attach_data() -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Tensor]:
            return loader()

    trainer, module, data = L.Trainer(**QUIET), Line(), Data()
    compat.attach_data(trainer, module, data)
    assert module.trainer is trainer
    assert data.trainer is trainer
    assert trainer.lightning_module is module
    assert trainer.estimated_stepping_batches == 2


def test_first_training_batch() -> None:
    seen: list[Any] = []

    def peek(trainer: L.Trainer) -> None:
        seen.append(compat.first_training_batch(trainer, lambda loader: next(iter(loader)).shape[0]))
        seen.append(compat.first_training_batch(trainer, None))

    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"] + batch["b"][0], batch_idx)

    fit(Both(), {"a": loader(), "b": [loader()]}, on_fit_start=peek)
    assert seen == [{"a": 2, "b": [2]}, None]


# --- modules and trainers


def test_trainer_of() -> None:
    module = Line()
    assert lightning_module.trainer_of(module) is None
    assert lightning_module.trainer_of(nn.Linear(1, 1)) is None
    trainer = fit(module)
    assert lightning_module.trainer_of(module) is trainer


def test_set_trainer() -> None:
    module, stand_in = Line(), object()
    lightning_module.set_trainer(module, stand_in)
    assert module.trainer is stand_in


def test_set_device() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.metric = Line(), MeanMetric()

    module, device = Around(), torch.device("meta")
    lightning_module.set_device(module, device)
    assert module.inner.device == device
    assert module.metric.device == torch.device("cpu")  # it was not moved
    module.inner.to("cpu")
    assert module.inner.device == torch.device("cpu")


def test_set_device_mesh() -> None:
    module, mesh = Line(), object()
    lightning_module.set_device_mesh(module, mesh)
    assert module.device_mesh is mesh


def test_on_epoch_end_reached() -> None:
    events, replaced = list[str](), Replaced()
    trainer = L.Trainer(**QUIET, callbacks=[At(on_validation_epoch_end=lambda _: events.append("hook"))])
    compat.on_epoch_end_reached(trainer, lambda: events.append("reached"), replaced)
    trainer.validate(Validated(), loader(), verbose=False)
    assert trainer.callback_metrics["value"] == 1
    *before, last = events
    assert set(before) == {"reached"}
    assert last == "hook"
    replaced.restore()
    trainer.validate(Validated(), loader(), verbose=False)
    assert events == [*before, last, "hook"]


# --- signals


def test_leave_signals_alone() -> None:
    handlers: list[Any] = []
    options = {**QUIET, "callbacks": [At(on_train_start=lambda _: handlers.append(signal.getsignal(signal.SIGTERM)))]}
    before = signal.getsignal(signal.SIGTERM)
    trainer = L.Trainer(**options)
    compat.leave_signals_alone(trainer, Replaced())
    trainer.fit(Line(), loader())
    assert handlers == [before]


def test_around_steps() -> None:
    """Functions come between what callbacks do and where Lightning looks whether it should stop."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    seen: list[str] = []
    note = lambda text: lambda *_: seen.append(text)  # noqa: E731
    hooks = At(on_train_batch_end=note("end"), on_validation_end=note("val"), on_train_epoch_end=note("epoch"))
    trainer = L.Trainer(**QUIET, callbacks=[hooks], num_sanity_val_steps=0)
    compat.around_steps(trainer, Replaced(), before=note("before"), after=note("after"), rested=note("rested"))
    trainer.fit(Validated(), loader(2), loader(1))
    assert seen == [*["before", "end", "after"] * 2, "val", "rested", "epoch", "rested"]


VALIDATING = {**QUIET, "limit_val_batches": 2, "num_sanity_val_steps": 0}


class Evaluated(Line):
    """Notes the mini-batches that it validates."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.events.append(batch_idx)


def saved_in_validation(path: Path) -> tuple[int, int]:
    """Batches that are ready and completed at the end of a run that was saved at the beginning of its validation."""

    def save(trainer: L.Trainer) -> None:
        with compat.counters_to_resume_from(trainer):
            trainer.save_checkpoint(path)

    return validated_batches(L.Trainer(**VALIDATING, callbacks=[At(on_validation_epoch_start=save)]), Evaluated())


def validated_batches(trainer: L.Trainer, module: L.LightningModule, **options: Any) -> tuple[int, int]:
    trainer.fit(module, loader(), loader(), **options)
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return progress.ready, progress.completed


def test_counters_to_resume_from(tmp_path: Path) -> None:
    """A run goes on with its own counters, a resumed one runs the validation from its beginning."""
    assert saved_in_validation(tmp_path / "saved.ckpt") == (2, 2)
    module = Evaluated()
    validated_batches(L.Trainer(**VALIDATING), module, ckpt_path=tmp_path / "saved.ckpt")
    assert module.events == [0, 1]


def test_begin_validation_anew(tmp_path: Path) -> None:
    """Without it a later checkpoint would say that a validation was interrupted."""
    saved_in_validation(tmp_path / "saved.ckpt")
    begin = At(on_train_start=compat.begin_validation_anew)
    trainer = L.Trainer(**VALIDATING, callbacks=[begin])
    assert validated_batches(trainer, Evaluated(), ckpt_path=tmp_path / "saved.ckpt") == (2, 2)


# --- metrics


def test_forward_cache() -> None:
    metric = MeanMetric()
    assert metric(torch.tensor(3.0)) == getattr(metric, compat.FORWARD_CACHE) == 3

    class Logging(Line):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.mean.update(batch)
            setattr(self.mean, compat.FORWARD_CACHE, torch.tensor(7.0))
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Logging())
    assert trainer.callback_metrics["mean_step"] == 7
    assert trainer.callback_metrics["mean_epoch"] == 1


def test_lightning_state() -> None:
    """What Lightning keeps in a module, and no name that a user may have chosen."""

    class Module(L.LightningModule):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    own = {name for name in vars(Module()).keys() - vars(nn.Module()).keys() if name.startswith("_")}
    assert own - {"_hparams"} == lightning_module.LIGHTNING_STATE
