"""Checkpoints, exceptions, pickling and tuners."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner

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


@scenario
def loaded_by_class(make: Make, folder: Path) -> Facts:
    path = str(folder / "saved.ckpt")
    trainer = make()
    trainer.fit(build(), loader())
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return {"state": Chain.load_from_checkpoint(path).double().state_dict()}


@scenario
def tested_with_the_best(make: Make, folder: Path) -> Facts:
    callback = ModelCheckpoint(folder, monitor="val_loss")
    module, trainer = build(), make(callbacks=[callback], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(10, seed=2))
    return {"found": trainer.test(module, loader(6, seed=4), ckpt_path="best", verbose=False)}


@scenario
def validated_from_a_file(make: Make, folder: Path) -> Facts:
    path, trainer = str(folder / "saved.ckpt"), make()
    trainer.fit(build(), loader())
    trainer.save_checkpoint(path)
    return {"found": make().validate(build(), loader(10, seed=2), ckpt_path=path, verbose=False)}


@scenario
def predicted_from_a_file(make: Make, folder: Path) -> Facts:
    path, trainer = str(folder / "saved.ckpt"), make()
    trainer.fit(build(), loader())
    trainer.save_checkpoint(path, weights_only=True)
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


@scenario
def saved_on_exception(make: Make, folder: Path) -> Facts:
    class Raises(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                raise ArithmeticError("on all ranks")

    with caught(ArithmeticError) as names:
        callbacks = [OnExceptionCheckpoint(folder), Raises()]
        make(callbacks=callbacks, enable_checkpointing=True).fit(build(), loader())
    return {"names": names, "file": _contents(folder / "on_exception.ckpt")}


@scenario
def saved_by_model_checkpoint_on_exception(make: Make, folder: Path) -> Facts:
    class Raises(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                raise ArithmeticError("on all ranks")

    with caught(ArithmeticError) as names:
        callbacks = [ModelCheckpoint(folder, save_on_exception=True), Raises()]
        make(callbacks=callbacks, enable_checkpointing=True).fit(build(), loader())
    files = [_contents(file) for file in folder.glob("*.ckpt")]
    return {"names": names, "files": files}


@scenario
def exception_in_a_hook(make: Make, folder: Path) -> Facts:
    with caught(ArithmeticError) as names:
        fitted(make, build(Failing))
    return {**fitted(make), "names": names}


@scenario
def interrupted(make: Make, folder: Path) -> Facts:
    class Interrupts(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                raise KeyboardInterrupt

    with caught(KeyboardInterrupt, SystemExit) as names:
        make(callbacks=[Interrupts()]).fit(build(), loader())
    return {"names": len(names)}


@scenario
def stopped_gracefully(make: Make, folder: Path) -> Facts:
    class Stops(Chain):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.trainer.should_stop = True

    return validated(make, build(Stops), max_epochs=4)


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


@scenario
def learning_rate_tuned(make: Make, folder: Path) -> Facts:
    module, trainer = build(), make(max_epochs=4)
    found = Tuner(trainer).lr_find(module, loader(), min_lr=1e-3, max_lr=0.5, num_training=6)
    return {"found": found.results["loss"], "rate": module.lr}


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
def batch_size_tuned(make: Make, folder: Path) -> Facts:
    module, trainer = build(Sized), make()
    return {"size": Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)}


@scenario
def empty_init(make: Make, folder: Path) -> Facts:
    trainer = make()
    with trainer.init_module(empty_init=True):
        module = Chain()
    path = str(folder / "saved.ckpt")
    first = make()
    first.fit(build(), loader())
    first.save_checkpoint(path)
    return {"found": len(trainer.validate(module.double(), loader(10), ckpt_path=path, verbose=False))}
