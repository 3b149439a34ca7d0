"""Recipes: the values of foreign tensors follow from those that ranks lend each other in a hook."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from torch import Tensor

Lender = Callable[[Tensor], Tensor | None]
"""Returns the values of a parameter or buffer; None if it is another tensor."""
lender: ContextVar[Lender | None] = ContextVar("lender", default=None)
"""In hooks in which ranks lend each other values: another one in each hook."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Computes the values of a tensor from lent ones.

    `hook`: lends in the hook in which the tensor was computed; later the parameters have other values. None for a view
    of a parameter, which always has the parameter's values.
    """

    hook: Lender | None
    compute: Callable[[], Tensor | None] = lambda: None

    def values(self, ask: Lender) -> Tensor | None:
        """The values; None if they were those of an earlier hook, or were changed."""
        return self.compute() if self.hook in (None, ask) else None


def _nobody(tensor: Tensor) -> Tensor | None:
    """Lend nothing, in no hook."""


CHANGED: Final = Recipe(_nobody)
"""Stands for a tensor that was changed, or computed in another way."""


def is_gone(recipe: Recipe | None) -> bool:
    """True if values were those of an earlier hook, or were changed."""
    return recipe is not None and recipe.hook not in (None, lender.get())
