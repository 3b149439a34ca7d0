"""Steps, optimizers and schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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


class NoIndex(Chain):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return self.loss(batch)


class AnyArguments(Chain):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss(args[0])


class MoreDefaults(Chain):
    def training_step(self, batch: Any, batch_idx: int, scale: float = 2.0) -> Any:
        return scale * self.loss(batch)


class ReadsCounters(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.global_step + 0.1 * self.current_epoch + 0.01 * batch_idx)


class ReturnsDict(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "more": torch.ones(3)}


class ReturnsNone(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


class NeverLearns(Chain):
    def configure_optimizers(self) -> Any:
        return None


class NoValidationStep(Chain):
    validation_step = None  # type: ignore[assignment]


class ValidatesWithoutNetwork(Chain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", batch[0].square().mean())


class ValidatesTwice(Chain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        calls = 2 if batch_idx == 0 else 1
        self.log("val_loss", sum(self.loss(batch) for _ in range(calls)))


class ValidatesOther(Chain):
    """The training step does not call `probe`, so no stage lists it: it is on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(6, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", nn.functional.mse_loss(self.probe(self.first(batch[0])), batch[1]))


class Adam(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Groups(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{"params": self.first.parameters(), "lr": 0.01}, {"params": self.last.parameters()}], 0.1
        )


class Listed(Chain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class OneCycle(Chain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Chain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class OnlyLast(Chain):
    def configure_optimizers(self) -> Any:
        self.first.requires_grad_(False)
        return torch.optim.SGD(self.last.parameters(), lr=0.1)


class Tied(Chain):
    more = ("back",)

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 6)
        self.back.weight = self.first[2].weight

    def forward(self, x: Any) -> Any:
        return self.last(self.back(self.first(x)).tanh())


class Noisy(Chain):
    """Draws random numbers in the step: two runs with one seed are the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.zeros_like(batch[0]).normal_() * 0
        return nn.functional.mse_loss(self(batch[0] + noise), batch[1])


class MovingCounter(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / self.batches


class Regularised(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.01 * self.last.weight.square().sum()


class WholeBatch(Chain):
    """A loss over all samples of the mini-batch, with a parameter of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0]) * self.scale
        return (out @ out.T).logsumexp(1).mean() - (out * batch[1]).sum(1).mean()


class Manual(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.log("train_loss", loss)
        return loss


class Adversarial(Manual):
    """Two optimizers that take turns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]


class Quasi(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Sharpness(Manual):
    """Two backwards per step: at the weights, and uphill of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = self.trainer.strategy.grad_norm() if hasattr(self.trainer.strategy, "grad_norm") else self._norm()
        moved = [(p, 0.05 * p.grad / (norm + 1e-12)) for p in self.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, step in moved:
                parameter.add_(step)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, step in moved:
                parameter.sub_(step)
        optimizer.step()
        return loss

    def _norm(self) -> torch.Tensor:
        return torch.stack([p.grad.norm() for p in self.parameters()]).norm()


class OwnBackward(Chain):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class Example(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4, dtype=torch.float64)


_KINDS = (
    *(NoIndex, AnyArguments, MoreDefaults, ReadsCounters, ReturnsDict, ReturnsNone, NeverLearns, NoValidationStep),
    *(ValidatesWithoutNetwork, ValidatesTwice, ValidatesOther, Adam, Groups, Listed, OneCycle, Plateau, OnlyLast),
    *(Tied, MovingCounter, Regularised, Manual, Adversarial, Quasi, Sharpness, OwnBackward, Noisy),
)


def _stepped(make: Make, folder: Path, kind: type[Chain], **gpp: Any) -> Facts:
    return validated(make, build(kind), gpp={**staged(kind), **gpp})


family("step", _stepped, {kind.__name__: {"kind": kind} for kind in _KINDS})
family(
    "whole",
    _stepped,
    {
        kind.__name__: {"kind": kind, "step": "whole"}
        for kind in (Chain, WholeBatch, OwnBackward, ReturnsDict, ReturnsNone, Quasi, Plateau, ReadsCounters)
    },
)


@scenario
def summary_with_an_example(make: Make, folder: Path) -> Facts:
    from lightning.pytorch.utilities.model_summary import summarize

    module, trainer = build(Example), make(enable_model_summary=True)
    trainer.fit(module, loader())
    sizes = summarize(module).out_sizes if trainer.is_global_zero else []
    return {**facts_of(trainer, module), "zero sizes": sizes, "example": module.example_input_array.shape}


@scenario
def accumulates_uneven(make: Make, folder: Path) -> Facts:
    return fitted(make, accumulate_grad_batches=2, gradient_clip_val=0.05, max_epochs=3)


@scenario
def whole_accumulates(make: Make, folder: Path) -> Facts:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    return validated(make, build(WholeBatch), gpp={"step": "whole"}, **options)
