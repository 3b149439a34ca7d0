"""Hooks that open the door to call the network or read weights of all ranks, and evaluation that data decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_gpp import summon_full_params
from tests.acceptance.scenarios.base import Chain, Facts, Make, build, facts_of, fitted, loader, scenario, validated

ONES = torch.ones(2, 4, dtype=torch.float64)


class Samples(Chain):
    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        with summon_full_params(self):
            self.seen.append(float(self(ONES).sum()))


@scenario
def samples_in_a_hook(make: Make, folder: Path) -> Facts:
    return validated(make, build(Samples))


@scenario
def samples_in_a_callback(make: Make, folder: Path) -> Facts:
    class Shows(pl.Callback):
        shown: list[float] = []

        @torch.no_grad()
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            with summon_full_params(pl_module):
                if trainer.is_global_zero:
                    self.shown.append(float(pl_module(ONES).sum() + pl_module.first(ONES).sum()))

    shows = Shows()
    shows.shown = []
    facts = fitted(make, callbacks=[shows])
    return {**facts, "zero_shown": shows.shown}


@scenario
def probe_stops(make: Make, folder: Path) -> Facts:
    """A probe on features, over data of its own, decides when training ends."""

    class Probe(pl.Callback):
        @torch.no_grad()
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            with summon_full_params(pl_module.first):
                features = torch.cat([pl_module.first(x) for x, _ in loader(10, seed=5)])
            pl_module.log("spread", features.var())

    return fitted(make, callbacks=[Probe(), EarlyStopping("spread", mode="max", patience=0)], max_epochs=4)


@scenario
def weights_in_a_hook(make: Make, folder: Path) -> Facts:
    class Reads(Chain):
        def on_train_epoch_end(self) -> None:
            with summon_full_params(self):
                self.log("norm", torch.cat([weight.detach().flatten() for weight in self.parameters()]).norm())
                self.seen += [float(weight.detach().cpu().numpy().std()) for weight in self.parameters()]

    return fitted(make, build(Reads))


@scenario
def loaders_with_other_steps(make: Make, folder: Path) -> Facts:
    class Two(Chain):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            found = self(x) if dataloader_idx == 0 else (self(x) + self(-x)) / 2
            self.log("val_loss", (found - y).square().mean())

    return fitted(make, build(Two), val=[loader(10, seed=2), loader(6, seed=3)])


@scenario
def decides_by_data(make: Make, folder: Path) -> Facts:
    class Refines(Chain):
        def refined(self, x: Tensor) -> Tensor:
            for _ in range(4):
                if self.first(x).sum().item() < 0:
                    x = x + 0.1
            return self.last(self.first(x).tanh())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.refined(batch[0]).square().mean())

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.refined(batch[0])

    module, trainer = build(Refines), make()
    trainer.fit(module, loader(), loader(10, seed=2))
    facts = facts_of(trainer, module)
    return {**facts, "zero_predicted": trainer.predict(module, loader(12, seed=3))}
