"""Hooks of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    facts_of,
    family,
    fitted,
    loader,
    scenario,
    staged,
    validated,
)

_NOTED = (
    *("configure_model", "configure_callbacks", "on_fit_start", "on_fit_end", "on_train_start"),
    *("on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_validation_start"),
    *("on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_model_eval", "on_validation_model_train", "on_save_checkpoint"),
    *("on_sanity_check_start", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end"),
)


def _noting(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(name)
        return getattr(super(Noting, self), name)(*args, **kwargs)

    return hook


class Noting(Chain):
    """Notes its hooks."""


for _name in _NOTED:
    if hasattr(Chain, _name):
        setattr(Noting, _name, _noting(_name))


@scenario
def order_of_hooks(make: Make, folder: Path) -> Facts:
    module, trainer = build(Noting), make()
    trainer.fit(module, loader(), loader(10, seed=2))
    trainer.test(module, loader(10), verbose=False)
    return {**facts_of(trainer, module), "seen": module.seen}


class ScalesGradients(Chain):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class LogsNorm(Chain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ClipsAll(Chain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


class ClipsAllAfterBackward(Chain):
    def on_after_backward(self) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.05))


class ClipsValues(Chain):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class NormOfWeights(Chain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("weights", torch.stack([p.detach().norm() for p in self.parameters()]).sum())


class ClipsItself(Chain):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")


class ZeroesItself(Chain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class WarmsUp(Chain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)


class EverySecond(Chain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class SkipsEpoch(Chain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 1 else None


class Transfers(Chain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand_like(batch[0]), batch[1]]


class TransfersItself(Chain):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [part.to(device) for part in batch]


class LogsInHooks(Chain):
    def on_train_epoch_start(self) -> None:
        self.log("start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("end", torch.tensor(self.losses).mean())

    def on_validation_epoch_end(self) -> None:
        self.log("validated", float(self.global_step))

    def on_train_start(self) -> None:
        self.log("begun", 1.0)


class Teacher(Chain):
    """A mean teacher, updated between the steps."""

    more = ("mean",)

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 2).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            for mean, new in zip(self.mean.parameters(), self.last.parameters(), strict=True):
                mean.mul_(0.9).add_(new, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.first(batch[0]).tanh()
        return nn.functional.mse_loss(self.last(hidden), batch[1] + 0.1 * self.mean(hidden))


class ChangesWeights(Chain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class Freezes(Chain):
    def on_train_epoch_start(self) -> None:
        for parameter in self.first.parameters():
            parameter.requires_grad = self.current_epoch > 0


class Schedules(Chain):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.seen.append(scheduler.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class Builds(Chain):
    more = ("late",)

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            torch.manual_seed(9)
            self.late = nn.Linear(2, 2).double()

    def forward(self, x: Any) -> Any:
        return self.late(super().forward(x))


class Sums(Chain):
    """Counts in hooks what the step sees."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, self.trainer.global_step, self.trainer.is_last_batch))


class Reports(Chain):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("index", float(batch_idx), on_epoch=True)


def _hooked(make: Make, folder: Path, kind: type[Chain]) -> Facts:
    return validated(make, build(kind), max_epochs=2, gpp=staged(kind))


family(
    "hook",
    _hooked,
    {
        kind.__name__: {"kind": kind}
        for kind in (
            *(ScalesGradients, LogsNorm, ClipsAll, ClipsAllAfterBackward, ClipsValues, NormOfWeights),
            *(ClipsItself, ZeroesItself, WarmsUp, EverySecond, SkipsEpoch, Transfers, TransfersItself, LogsInHooks),
            *(Teacher, ChangesWeights, Freezes, Schedules, Builds, Sums, Reports),
        )
    },
)


@scenario
def teardown_hooks(make: Make, folder: Path) -> Facts:
    class Ends(Chain):
        def setup(self, stage: str) -> None:
            self.seen.append(("setup", stage))

        def teardown(self, stage: str) -> None:
            self.seen.append(("teardown", stage))

    return fitted(make, build(Ends))


@scenario
def loaders_of_the_module(make: Make, folder: Path) -> Facts:
    class Loads(Chain):
        def train_dataloader(self) -> Any:
            self.seen.append("train")
            return loader(shuffle=True)

        def val_dataloader(self) -> Any:
            self.seen.append("val")
            return loader(10, seed=2)

    module = build(Loads)
    torch.manual_seed(4)
    trainer = make(reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return {**facts_of(trainer, module), "seen": sorted(module.seen)}  # the first loader of training is needed earlier
