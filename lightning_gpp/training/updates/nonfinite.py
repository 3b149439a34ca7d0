"""Losses and gradients that are not finite, found by all ranks together before an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_gpp.errors import GPPError
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.replicas import Layout

_REMEDY: Final = (
    "Lower the learning rate, clip gradients (trainer.gradient_clip_val), leave out such steps with "
    "strategy.on_nonfinite=skip, or continue regardless with strategy.on_nonfinite=ignore."
)


class FiniteCheck:
    """Lets all ranks stop, or leave out the same optimizer step, if any of them has a number that is not finite.

    Of several the one nearest to the loss is named, because backwards carry it from there to the stages before.

    Args:
        module: the module with the parameters.
        layout: the stages that use them.
        control: the side channel of this rank.
        optimizers: the optimizers, whose gradients are dropped for a step that is left out.
        skips: leave out the step instead of ending the run.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, control: Control, optimizers: Sequence[Optimizer], *, skips: bool
    ) -> None:
        self._module, self._layout, self._control = module, layout, control
        self._optimizers, self._skips = optimizers, skips
        self._losses: list[Tensor] = []

    def note(self, losses: Iterable[Tensor]) -> None:
        """Note the losses of the micro-batches of a mini-batch, on the rank that runs the step."""
        self._losses += [loss.isfinite().all() for loss in losses]

    def before_update(self, step: int) -> None:
        """Look at what was noted, and at the gradients. All ranks call this together.

        Args:
            step: number of the mini-batch.

        Raises:
            GPPError: on all ranks; a number is not finite, and steps are not left out.
        """
        names = self._nearest_last()
        number = self._agreed(self._rank_of_worst(names))
        self._losses.clear()
        if not number:
            return
        what = "The loss" if number > len(names) else f"The gradient of {self._described(names[number - 1])}"
        text = f"{what} is not finite after mini-batch {step}"
        if not self._skips:
            raise GPPError(f"{text}. {_REMEDY}")
        self._control.warn(f"{text}, so this optimizer step is left out (strategy.on_nonfinite=skip).")
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._here().values():
            parameter.grad = None

    def _nearest_last(self) -> list[str]:
        """All trained parameters, the same on all ranks: those of later stages later, within a stage the first last."""
        names = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        names.reverse()
        names.sort(key=lambda name: max(self._layout.uses.get(name, ()), default=-1))
        return names

    def _rank_of_worst(self, names: Sequence[str]) -> int:
        """One plus the position of the last name whose gradient on this rank is not finite; 0 if all are.

        A loss that is not finite comes after all names. Loss and gradients are read together, once.
        """
        here = self._here()
        gradients = {name: local(grad) for name in names if name in here and (grad := here[name].grad) is not None}
        norm = get_total_norm(gradients.values()).isfinite()
        *losses, gradient = torch.stack([*(flag.to(norm.device) for flag in self._losses), norm]).tolist()
        if not all(losses):
            return len(names) + 1
        if gradient:
            return 0
        numbers = (number for number, name in enumerate(names, 1) if name in gradients)
        return max((n for n in numbers if not bool(gradients[names[n - 1]].isfinite().all())), default=0)

    def _here(self) -> dict[str, nn.Parameter]:
        names = self._layout.placement.names_on(self._control.device)
        return {name: parameter for name, parameter in self._module.named_parameters() if name in names}

    def _agreed(self, number: int) -> int:
        if self._control.num_processes == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control.everyone)
        return int(largest)

    def _described(self, name: str) -> str:
        stages = [repr(self._layout.plan.stages[stage].name) for stage in self._layout.uses.get(name, ())]
        return f"{name!r} in stage {' and '.join(stages)}" if stages else f"{name!r}, which no stage uses,"
