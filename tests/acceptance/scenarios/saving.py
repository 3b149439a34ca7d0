"""Checkpoints, exceptions, pickling and tuners."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    caught,
    data,
    facts_of,
    family,
    fitted,
    loader,
    scenario,
    staged,
    validated,
)


def _saved(make: Make, folder: Path, **options: Any) -> Facts:
    callback = ModelCheckpoint(folder / "saved", **options)
    facts = validated(make, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    names = sorted(str(file.relative_to(folder)) for file in folder.glob("saved/*"))
    best = Path(callback.best_model_path).name
    score = None if callback.best_model_score is None else float(callback.best_model_score)
    return {**facts, "names": names, "best": best, "score": score, "file": _contents(folder / "saved" / best)}


def _contents(path: Path) -> Any:
    if not path.is_file():
        return None
    saved = torch.load(path, weights_only=False)
    return {
        name: saved.get(name) for name in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
    }


family(
    "saved",
    _saved,
    {
        "last": {"save_last": True},
        "best": {"monitor": "val_loss"},
        "two_best": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.6f}"},
        "all": {"save_top_k": -1, "every_n_epochs": 1},
        "every_steps": {"every_n_train_steps": 2, "save_top_k": -1},
        "weights": {"save_weights_only": True},
        "at_end_of_training": {"save_on_train_epoch_end": True},
        "maximum": {"monitor": "train_loss_epoch", "mode": "max"},
    },
)


def _resumed(make: Make, folder: Path, first: dict[str, Any], then: dict[str, Any], **options: Any) -> Facts:
    path = str(folder / "saved.ckpt")
    trainer = make(**first)
    trainer.fit(build(), loader(), loader(10, seed=2))
    trainer.save_checkpoint(path)
    module, trainer = build(lr=0.3), make(**then)
    trainer.fit(module, loader(), loader(10, seed=2), ckpt_path=path, weights_only=False)
    return {**facts_of(trainer, module), "file": _contents(Path(path))}


family(
    "resumed",
    _resumed,
    {
        "after_an_epoch": {"first": {"max_epochs": 1}, "then": {"max_epochs": 3}},
        "within_an_epoch": {"first": {"max_steps": 4, "max_epochs": -1}, "then": {"max_epochs": 3}},
        "with_accumulation": {
            "first": {"max_epochs": 1, "accumulate_grad_batches": 2},
            "then": {"max_epochs": 2, "accumulate_grad_batches": 2},
        },
    },
)


def _file(make: Make, folder: Path, **options: Any) -> str:
    """The path of a checkpoint of a training."""
    path, trainer = str(folder / "saved.ckpt"), make()
    trainer.fit(build(), loader())
    trainer.save_checkpoint(path, **options)
    trainer.strategy.barrier()
    return path


@scenario
def loaded_by_class(make: Make, folder: Path) -> Facts:
    return {"state": Chain.load_from_checkpoint(_file(make, folder)).double().state_dict()}


@scenario
def tested_with_the_best(make: Make, folder: Path) -> Facts:
    callback = ModelCheckpoint(folder, monitor="val_loss")
    module, trainer = build(), make(callbacks=[callback], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(10, seed=2))
    return {"found": trainer.test(module, loader(6, seed=4), ckpt_path="best", verbose=False)}


@scenario
def validated_from_a_file(make: Make, folder: Path) -> Facts:
    path = _file(make, folder)
    return {"found": make().validate(build(), loader(10, seed=2), ckpt_path=path, verbose=False)}


@scenario
def predicted_from_a_file(make: Make, folder: Path) -> Facts:
    path = _file(make, folder, weights_only=True)
    return {"zero found": make().predict(build(), loader(10, seed=2), ckpt_path=path)}


@scenario
def entries_of_hooks(make: Make, folder: Path) -> Facts:
    class Entries(Chain):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["copied"] = {name: value.clone() for name, value in self.state_dict().items()}
            checkpoint["number"] = self.global_step

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["number"])

    path, trainer = str(folder / "saved.ckpt"), make()
    trainer.fit(build(Entries), loader())
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    module, again = build(Entries), make(max_epochs=3)
    again.fit(module, loader(), ckpt_path=path, weights_only=False)
    return {**facts_of(again, module), "copied": torch.load(path, weights_only=False)["copied"]}


@scenario
def module_as_hyperparameter(make: Make, folder: Path) -> Facts:
    class Given(Chain):
        more = ("tail",)

        def __init__(self, tail: torch.nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.tail = tail

        def forward(self, x: Any) -> Any:
            return self.tail(super().forward(x))

    path, trainer = str(folder / "saved.ckpt"), make(gpp=staged(Given))
    trainer.fit(build(Given, tail=torch.nn.Linear(2, 2)), loader())
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    saved = torch.load(path, weights_only=False)["hyper_parameters"]["tail"].state_dict()
    return {"saved": saved}


class Failing(Chain):
    """Fails at one batch, on all ranks that run the step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 4:
            raise ArithmeticError("on all ranks")


class Raises(pl.Callback):
    """Raises in one step, on all ranks."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise self.kind("on all ranks")


def _saved_then(make: Make, folder: Path, callback: type[Any], **options: Any) -> Facts:
    with caught(ArithmeticError) as names:
        callbacks = [callback(folder, **options), Raises(ArithmeticError)]
        make(callbacks=callbacks, enable_checkpointing=True).fit(build(), loader())
    return {"names": names, "files": [_contents(file) for file in folder.glob("*.ckpt")]}


family(
    "saved_on_exception",
    _saved_then,
    {
        "by_its_callback": {"callback": OnExceptionCheckpoint},
        "by_model_checkpoint": {"callback": ModelCheckpoint, "save_on_exception": True},
    },
)


@scenario
def exception_in_a_hook(make: Make, folder: Path) -> Facts:
    with caught(ArithmeticError) as names:
        fitted(make, build(Failing))
    return {**fitted(make), "names": names}


@scenario
def interrupted(make: Make, folder: Path) -> Facts:
    with caught(KeyboardInterrupt, SystemExit) as names:
        make(callbacks=[Raises(KeyboardInterrupt)]).fit(build(), loader())
    return {"names": len(names)}


@scenario
def pickled_after_fit(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make()
    trainer.fit(module, loader())
    if trainer.is_global_zero:  # other ranks have parts of the module
        pickle.loads(pickle.dumps(trainer))
    return facts_of(trainer, module)


@scenario
def copied_after_fit(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make()
    trainer.fit(module, loader())
    copied = copy.deepcopy(module)
    return {"zero state": copied.state_dict(), "names": list(copied.state_dict())}


@scenario
def learning_rate_found(make: Make, folder: Path) -> Facts:
    finder = LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=6)
    facts = fitted(make, callbacks=[finder], max_epochs=4)
    return {**facts, "losses found": finder.optimal_lr.results["loss"], "suggested": finder.optimal_lr.suggestion()}


class Sized(Chain):
    batch_size = 2
    validation_step = None  # type: ignore[assignment]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(), batch_size=self.batch_size)


@scenario
def batch_size_found(make: Make, folder: Path) -> Facts:
    module = build(Sized)
    trainer = make(callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)])
    trainer.fit(module)
    return {**facts_of(trainer, module), "size": module.batch_size}


@scenario
def empty_init(make: Make, folder: Path) -> Facts:
    trainer = make()
    with trainer.init_module(empty_init=True):
        module = Chain()
    path = _file(make, folder)
    return {"found": len(trainer.validate(module.double(), loader(10), ckpt_path=path, verbose=False))}
