"""Callbacks of Lightning, and of users."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as known
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    caught,
    facts_of,
    family,
    fitted,
    loader,
    plain,
    scenario,
    validated,
)


def _with(make: Make, folder: Path, callback: Any, **options: Any) -> Facts:
    made = callback()
    facts = validated(make, callbacks=[made], **{"max_epochs": 4, **options})
    return {**facts, "state of it": _numbers(made.state_dict())}


def _numbers(state: Any) -> dict[str, Any]:
    kinds = (int, float, str)
    return {name: value for name, value in state.items() if isinstance(value, kinds) and not name.endswith("path")}


family(
    "callback",
    _with,
    {
        "early_stopping": {"callback": partial(known.EarlyStopping, "val_loss", min_delta=0.5, patience=1)},
        "early_stopping_on_train": {
            "callback": partial(known.EarlyStopping, "train_loss_epoch", stopping_threshold=1.2)
        },
        "early_stopping_in_training": {
            "callback": partial(known.EarlyStopping, "train_loss", patience=0, check_on_train_epoch_end=True)
        },
        "divergence": {"callback": partial(known.EarlyStopping, "val_loss", divergence_threshold=0.1)},
        "timer": {"callback": partial(known.Timer, "00:01:00:00")},
        "progress": {"callback": known.TQDMProgressBar, "enable_progress_bar": True},
        "rich_progress": {"callback": known.RichProgressBar, "enable_progress_bar": True},
        "summary": {"callback": partial(known.ModelSummary, max_depth=2), "enable_model_summary": True},
        "accumulation": {"callback": partial(known.GradientAccumulationScheduler, {0: 1, 2: 2})},
        "device_stats": {"callback": known.DeviceStatsMonitor, "with_logger": True},
        "spikes": {"callback": known.SpikeDetection},
        "averages": {"callback": partial(known.StochasticWeightAveraging, 0.02, swa_epoch_start=1)},
        "exponential": {"callback": partial(known.EMAWeightAveraging, decay=0.9)},
        "weight_averages": {"callback": partial(known.WeightAveraging, avg_fn=get_ema_avg_fn(0.9))},
        "pruning": {"callback": partial(known.ModelPruning, "l1_unstructured", amount=0.5)},
        "lambda": {
            "callback": partial(known.LambdaCallback, on_train_epoch_end=lambda t, m: m.seen.append(t.global_step))
        },
    },
)


@scenario
def learning_rates_logged(make: Make, folder: Path) -> Facts:
    monitor = known.LearningRateMonitor("step")
    facts = validated(make, callbacks=[monitor], with_logger=True, log_every_n_steps=1)
    return {**facts, "monitored": {name: list(values) for name, values in monitor.lrs.items()}}


@scenario
def throughput(make: Make, folder: Path) -> Facts:
    monitor = known.ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0), window_size=2)
    trainer = make(callbacks=[monitor], with_logger=True, log_every_n_steps=1, max_epochs=3)
    trainer.fit(build(), loader())
    written = [row for row in trainer.logger.rows if "train|samples" in row]
    names = sorted({name for row in written for name in row if "per_sec" not in name and "time" not in name})
    job = sorted({name for row in written for name in row if name.endswith("samples_per_sec")})
    totals = [(row["train|batches"], row["train|samples"]) for row in written]
    return {"zero totals": totals, "zero names": names, "zero job": job}


class Writer(known.BasePredictionWriter):
    """Writes as the documentation of Lightning does, one file per rank."""

    def __init__(self, folder: Path, interval: str) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        torch.save(prediction, self.folder / f"batch{loader}_{batch_idx}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, self.folder / f"predictions_{trainer.global_rank}.pt")
        torch.save(batch_indices, self.folder / f"indices_{trainer.global_rank}.pt")


def _written(make: Make, folder: Path, interval: str, loaders: int = 1) -> Facts:
    class Several(Chain):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0])

    trainer = make(callbacks=[Writer(folder, interval)])
    given = [loader(10), loader(6, seed=2)][:loaders]
    trainer.predict(build(Several), given if loaders > 1 else given[0], return_predictions=False)
    trainer.strategy.barrier()
    files = {file.name: torch.load(file) for file in sorted(folder.glob("*.pt"))}
    return {"files": files}


family(
    "writer",
    _written,
    {
        "batch": {"interval": "batch"},
        "epoch": {"interval": "epoch"},
        "both": {"interval": "batch_and_epoch"},
        "several": {"interval": "batch_and_epoch", "loaders": 2},
    },
)


class Notes(pl.Callback):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append(("train", batch_idx, float(outputs["loss"])))
        self.log("callback_loss", outputs["loss"])

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.notes.append(("val", batch_idx))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.notes.append(plain(trainer.callback_metrics))

    def state_dict(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notes = state["notes"]


@scenario
def own_callback(make: Make, folder: Path) -> Facts:
    notes = Notes()
    return {**validated(make, callbacks=[notes]), "notes": notes.notes}


@scenario
def callback_resumed(make: Make, folder: Path) -> Facts:
    path = str(folder / "saved.ckpt")
    trainer, module = make(callbacks=[Notes()], max_epochs=1), build()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    notes = Notes()
    facts = fitted_from(make, path, callbacks=[notes], max_epochs=2)
    return {**facts, "notes": notes.notes}


def fitted_from(make: Make, path: str, **options: Any) -> Facts:
    trainer, module = make(**options), build()
    trainer.fit(module, loader(), ckpt_path=path, weights_only=False)
    return facts_of(trainer, module)


@scenario
def callback_logs(make: Make, folder: Path) -> Facts:
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.log("rate", trainer.optimizers[0].param_groups[0]["lr"])
            module.log("of_module", 2.0)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.callback_metrics["made"] = torch.tensor(3.0)

    return validated(make, callbacks=[Logs()])


@scenario
def callback_clips(make: Make, folder: Path) -> Facts:
    class Clips(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.seen.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))

    return validated(make, callbacks=[Clips()])


@scenario
def callbacks_of_the_module(make: Make, folder: Path) -> Facts:
    class Configures(Chain):
        def configure_callbacks(self) -> Any:
            return [known.EarlyStopping("val_loss", min_delta=0.5, patience=1)]

    return validated(make, build(Configures), max_epochs=4)


@scenario
def callback_raises(make: Make, folder: Path) -> Facts:
    class Raises(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            raise ArithmeticError("everywhere")

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            module.seen.append(type(exception).__name__)

    module, trainer = build(), make(callbacks=[Raises()])
    with caught(ArithmeticError) as names:
        trainer.fit(module, loader())
    return {"names": names, "seen": module.seen, "losses": module.losses}


@scenario
def trial_pruned(make: Make, folder: Path) -> Facts:
    """A hyperparameter search catches the exception of a trial, and goes on."""

    class PrunedError(Exception):
        pass

    class Prunes(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1 and not trainer.sanity_checking:
                raise PrunedError

    with caught(PrunedError) as names:
        validated(make, callbacks=[Prunes()], max_epochs=4)
    return {**fitted(make), "names": names}
