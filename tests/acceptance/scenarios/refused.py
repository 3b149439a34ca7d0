"""What two ranks refuse, and one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gpp.strategy import batch_readers as readers
from tests.acceptance.scenarios.base import Chain, Facts, Make, build, facts_of, family, loader, staged, validated
from tests.acceptance.scenarios.habits import Texts, _OfBatch, named
from tests.acceptance.scenarios.hooks import Teacher


class Squares(Chain):
    """Combines gradients in another way than by their norms."""

    def on_after_backward(self) -> None:
        float(torch.stack([p.grad.square().sum() for p in self.parameters() if p.grad is not None]).sum())


class NormsOfClamped(Chain):
    """Changes gradients, so that their norms are not known any more."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).sum())


class DropsGradients(Chain):
    """Drops gradients if one is not finite, as forums pass it on."""

    def on_after_backward(self) -> None:
        if any(each.grad.isnan().any() for each in self.parameters() if each.grad is not None):
            self.zero_grad()


class TeacherOfOther(Teacher):
    """A mean of weights that another rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 6)
        self.mean.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.mean(self.first(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mean, new in zip(self.mean.parameters(), self.first[2].parameters(), strict=True):
            mean.data.mul_(0.9).add_(new.data, alpha=0.1)


class ComputesEarly(Chain):
    """Computes a metric in a hook, of which only the step's rank has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.compute()


class ReadsLarge(Chain):
    """A hook uses a mini-batch that is too large to be on every rank."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].sum()


class HooksGradient(Chain):
    """`late`: after set-up."""

    late = False

    def setup(self, stage: str) -> None:
        if not self.late:
            self.last.weight.register_hook(lambda gradient: gradient)

    def on_train_start(self) -> None:
        if self.late:
            self.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class HooksGradientLate(HooksGradient):
    late = True


class EvaluatesTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class RepeatsClosure(Chain):
    def configure_optimizers(self) -> Any:
        return EvaluatesTwice(self.parameters(), lr=0.1)


def _trained(make: Make, folder: Path, kind: type[Chain], most_bytes: int = 0, **gpp: Any) -> Facts:
    before = readers.MOST_BYTES
    readers.MOST_BYTES = most_bytes or before  # type: ignore[misc]
    try:
        return validated(make, build(kind), gpp={**staged(kind), **gpp})
    finally:
        readers.MOST_BYTES = before  # type: ignore[misc]


WHOLE = {"step": "whole"}
family(
    "refused",
    _trained,
    {
        "squares": {"kind": Squares},
        "norms_of_clamped": {"kind": NormsOfClamped},
        "drops_gradients": {"kind": DropsGradients},
        "teacher": {"kind": TeacherOfOther},
        "early_metric": {"kind": ComputesEarly},
        "large": {"kind": ReadsLarge, "most_bytes": 100},
        "gradient_hook": {"kind": HooksGradient},
        "late_gradient_hook": {"kind": HooksGradientLate, **WHOLE},
        "repeated_closure": {"kind": RepeatsClosure, **WHOLE},
    },
)


class ReadsTexts(Texts):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Reading(self.first.layers)


class _Reading(_OfBatch):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return super().forward(batch) + torch.tensor([len(name) for name in batch["name"]]).unsqueeze(1)


def _fed(make: Make, folder: Path, **gpp: Any) -> Facts:
    module, trainer = build(ReadsTexts), make(gpp={**staged(ReadsTexts), **gpp})
    trainer.fit(module, loader(collate_fn=named))
    return facts_of(trainer, module)


family("refused", _fed, {"texts": {}, "texts_whole": WHOLE})


def _without_flush(make: Make, folder: Path, hook: str) -> Facts:
    """A hook changes what a stage does while mini-batches are in a pipeline that does not flush."""

    class Changes(Chain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if hook == "freezes":
                self.first.requires_grad_(self.global_step != 1)

    class Opens(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            from lightning_gpp import summon_full_params

            with summon_full_params(pl_module):
                pass

    callbacks = [Opens()] if hook == "opens" else []
    return validated(make, build(Changes), callbacks=callbacks, gpp={"weights": "stash", "schedule": "1f1b"})


family(
    "refused", _without_flush, {"freezes_without_flush": {"hook": "freezes"}, "door_without_flush": {"hook": "opens"}}
)
