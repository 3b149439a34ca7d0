"""What steps and hooks of many users do beside computing a loss."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging
from torch import Tensor, nn

from lightning_gpp import summon_full_params
from tests.acceptance.scenarios.base import (
    Chain,
    Facts,
    Make,
    build,
    facts_of,
    family,
    loader,
    scenario,
    staged,
    validated,
)


class DecidesByOutputs(Chain):
    """The module's own hook decides by more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        return {"loss": nn.functional.mse_loss(out, batch[1]), "positive": (out > 0).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(int(outputs["positive"]))
        if outputs["positive"] > 4:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.98)


class FreezesInStep(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first[0].requires_grad_(self.global_step >= 3)
        return self.loss(batch)


class EvaluatesInStep(Chain):
    """Dropout is off in the step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first.append(nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first.eval()
        return self.loss(batch)


class SetsRate(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.2 / (1 + self.global_step)
        return self.loss(batch)


class ChangesBatch(Chain):
    """Normalises in place, in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].div_(2).add_(0.1)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].div_(2)
        self.log("val", self.loss(batch) + batch[0].mean())


class LogsSome(Chain):
    """Logs means over some of the samples, as many as it says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = (self(batch[0]) - batch[1]).square().mean(1)
        chosen = batch[0][:, 0] > 0
        number = int(chosen.sum())
        self.log("chosen", (losses * chosen).sum() / max(1, number), batch_size=number, on_step=False, on_epoch=True)
        return losses.mean()


class Noise(Chain):
    """Starts layers anew, and draws in hooks outside of mini-batches."""

    def on_train_epoch_start(self) -> None:
        self.first[2].reset_parameters()
        self.last.reset_parameters()
        frozen = random.random() < 0.5
        self.first.requires_grad_(not frozen)
        self.seen += [frozen, *torch.rand(2).tolist()]

    def on_validation_epoch_end(self) -> None:
        self.log("drawn", torch.rand(2).sum())


class OwnGenerators(Chain):
    """Random generators in attributes, in front of the network and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = SimpleNamespace(python=random.Random(0), numpy=np.random.RandomState(1))
        self.behind, self.torch = np.random.default_rng(2), torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 1 + self.before.python.random() + self.before.numpy.rand()
        noise = torch.randn(batch[0].shape, generator=self.torch, dtype=batch[0].dtype)
        return self.loss([scale * (batch[0] + noise), batch[1]]) * (1 + self.behind.random())


class DrawsBehind(Chain):
    """A random generator behind the network alone."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = np.random.default_rng(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.behind.random())


class Norms(Chain):
    """Norms of all gradients by several functions, in front of and behind a change of all gradients; no use of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first.spare = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first[:3]:
            x = layer(x)
        return self.last(x.tanh())

    def on_after_backward(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append([float(each.norm(order)) for each in gradients for order in (1.0, 2.0, float("inf"))])
        self.seen.append([float(norm) for norm in torch._foreach_norm(gradients, 1.0)])
        for gradient in gradients:
            gradient.mul_(3.0).div_(torch.tensor(2.0))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.02)))


class ClipsGroups(Chain):
    """Clips by hand, over the groups of the optimizer."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.norm().item() ** 2 for p in found) ** 0.5
        for parameter in found:
            parameter.grad.mul_(min(1.0, 0.2 / norm))
        self.seen.append(norm)


class GrowsGroup(Chain):
    """The first part is released after an epoch, as a new group of the optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": list(self.first.parameters()), "lr": 0.01})

    def configure_optimizers(self) -> Any:
        self.first.requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


def _trained(make: Make, folder: Path, kind: type[Chain], **gpp: Any) -> Facts:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.manual_seed(5 + rank)  # ranks draw in hooks what rank 0 draws
    random.seed(5 + rank)
    return validated(make, build(kind), gradient_clip_val=0.5, gpp={**staged(kind), **gpp})


family(
    "habit",
    _trained,
    {
        **{
            kind.__name__: {"kind": kind}
            for kind in (
                *(DecidesByOutputs, FreezesInStep, EvaluatesInStep, SetsRate, ChangesBatch, LogsSome, Noise, Norms),
                *(ClipsGroups, GrowsGroup),
            )
        },
        "DrawsBehind": {"kind": DrawsBehind, "num_micro_batches": 1},
    },
)
family(
    "whole_habit",
    _trained,
    {kind.__name__: {"kind": kind, "step": "whole"} for kind in (OwnGenerators, ClipsGroups)},
)


class Texts(Chain):
    """A batch with names and numbers goes to a module as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _OfBatch(self.first)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert [len(name) for name in batch["name"]] == [1 + number % 3 for number in batch["number"]]
        loss = nn.functional.mse_loss(self.last(self.first(batch).tanh()), batch["y"])
        self.log("loss", loss, batch_size=len(batch["name"]))
        return loss


class _OfBatch(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: dict[str, Any]) -> Tensor:
        out: Tensor = self.layers(batch["x"])
        return out


def named(samples: Any) -> dict[str, Any]:
    """With a tuple of texts and a list of numbers."""
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    numbers = list(range(len(x)))
    return {"x": x, "y": y, "name": tuple("a" * (1 + number % 3) for number in numbers), "number": numbers}


@scenario
def texts_to_modules(make: Make, folder: Path) -> Facts:
    module, trainer = build(Texts), make()
    trainer.fit(module, loader(collate_fn=named))
    return facts_of(trainer, module)


class _Saves(Callback):
    """Saves in the middle of training, with norms that a hook adds."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.file)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        with summon_full_params(pl_module):
            checkpoint["norms"] = {name: value.norm().item() for name, value in pl_module.named_parameters()}


@scenario
def averages_in_a_checkpoint(make: Make, folder: Path) -> Facts:
    """Saved from a hook, with the averages, the weights that are averaged, and values of all ranks."""
    validated(make, callbacks=[EMAWeightAveraging(decay=0.9), _Saves(folder / "saved")])
    saved = torch.load(folder / "saved", weights_only=False)
    return {name: saved[name] for name in ("state_dict", "current_model_state", "norms", "optimizer_states")}


@scenario
def finetuning_resumed(make: Make, folder: Path) -> Facts:
    """Groups that a callback added are there after a resumption."""

    class Backbone(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.first

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    facts = {}
    for path in (None, folder / "saved"):
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
        module, trainer = build(Backbone), make(callbacks=[finetuning, _Saves(folder / "saved")], max_epochs=3)
        trainer.fit(module, loader(), loader(10, seed=2), ckpt_path=path, weights_only=False)
        facts[f"from {path and path.name}"] = facts_of(trainer, module)["losses"], facts_of(trainer, module)["rates"]
    return facts
