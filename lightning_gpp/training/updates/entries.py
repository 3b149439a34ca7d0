"""The parts of mini-batches in an optimizer step whose loss is a mean over entries, such as tokens, of all of them: of
an accumulation, and of all pipelines. None knows those after it, so that it scales the gradients of those before it:

    entries    300         100                  400
    gradient   g0      ->  3/4 g0 + 1/4 g1  ->  3/8 g0 + 1/8 g1 + 1/2 g2

At any time they are those of the mean so far; norms, clipping and hooks find nothing else.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.training.control import Control


class EntriesOfStep:
    """The entries of the mini-batches of an optimizer step. All ranks call its methods together.

    Args:
        module: the module, whose parameters have the gradients.
        control: the side channel of this rank.

    Attributes:
        here: the entries of this pipeline's latest mini-batch, on the rank that loads it; None if they do not count.
    """

    def __init__(self, module: nn.Module, control: Control) -> None:
        self._module, self._control, self._so_far = module, control, 0.0
        self.here: float | None = None

    def add(self, entries: float) -> float:
        """The part of this pipeline's next mini-batch in the mean so far; scales the gradients of those before it."""
        self.here, before = entries, self._so_far
        self._so_far += self._control.sum(torch.tensor([entries], dtype=torch.float64)).item()
        if 0 < before < self._so_far:
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(before / self._so_far)
        return entries / self._so_far if self._so_far else 0.0

    def end(self) -> None:
        """End the optimizer step."""
        self._so_far = 0.0
