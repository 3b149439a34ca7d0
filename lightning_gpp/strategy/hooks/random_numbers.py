"""Hooks that draw random numbers draw the same ones on every rank: those of global rank 0.

So ranks take the same decisions, and what is drawn for parameters of other ranks is drawn here, too, and thrown away.
"""

from __future__ import annotations

from typing import Final

import lightning.pytorch as pl
from torch import nn

from lightning_gpp.replaced import Around, Replaced
from lightning_gpp.strategy.hooks.found import GRADIENTS, LOOPS, names_in, user_hooks

_HOOKS: Final = (
    *("on_fit_start", "on_fit_end"),
    *(f"on_{loop}_{moment}" for loop in LOOPS for moment in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{loop}_batch_{moment}" for loop in LOOPS for moment in ("start", "end")),
    *("on_before_backward", "on_before_zero_grad", *GRADIENTS),
)
_LAYERS: Final = {name for name, kind in vars(nn).items() if hasattr(kind, "reset_parameters")}
"""Names of layers of torch, which draw their parameters when they are made."""
_DRAWING: Final = {
    *_LAYERS,
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("bernoulli_", "multinomial", "poisson", "random_", "exponential_", "orthogonal_", "dropout", "reset_parameters"),
    *("random", "randrange", "gauss", "uniform", "choice", "choices", "shuffle", "sample"),
    *("standard_normal", "permutation", "integers"),
}
"""Names of functions of torch, Python and NumPy that draw random numbers, and of layers."""
_FILLING: Final = ("normal_", "uniform_")
"""Ends of names of functions that fill tensors with random numbers."""


class RandomHooks:
    """Replaces such hooks of module and callbacks.

    Args:
        trainer: of the run.
        one_stream: makes a context in which all processes draw the numbers of the first one; they enter it together.
    """

    def __init__(self, trainer: pl.Trainer, one_stream: Around) -> None:
        self._trainer, self._one_stream = trainer, one_stream
        self._replaced = Replaced()

    def attach(self) -> None:
        for found in user_hooks(self._trainer, _HOOKS):
            if any(name in _DRAWING or name.endswith(_FILLING) for name in names_in(found, self._trainer)):
                self._replaced.surround(found.owner, found.name, self._one_stream)

    def detach(self) -> None:
        self._replaced.restore()
