"""Recipes: the values of foreign tensors follow from those that ranks lend each other in a hook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor


class Lender:
    """Lends values in one hook, and counts the changes of tensors in it.

    Args:
        value: returns the values of a parameter or buffer; None if it is another tensor.
    """

    def __init__(self, value: Callable[[Tensor], Tensor | None]) -> None:
        self._value = value
        self.changes = Counter[str]()

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """The values of a parameter or buffer."""
        return self._value(tensor)


lender: ContextVar[Lender | None] = ContextVar("lender", default=None)
"""In hooks in which ranks lend each other values: another one in each hook."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Computes the values of a tensor from lent ones.

    `hook`: lends in the hook in which the tensor was computed; later the parameters have other values. None for a view
    of a parameter, which always has the parameter's values. `changes`: how often the tensors with these names had been
    changed in that hook.
    """

    hook: Lender | None
    compute: Callable[[], Tensor | None] = lambda: None
    changes: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_present(self) -> bool:
        """False if the values were those of an earlier hook, or what they follow from was changed since."""
        ask = lender.get()
        if self.hook is None:
            return True
        return self.hook is ask and all(self.hook.changes[name] == count for name, count in self.changes.items())

    def values(self) -> Tensor | None:
        """The values; None if they were those of an earlier hook, or were changed."""
        return self.compute() if self.is_present else None


CHANGED: Final = Recipe(Lender(lambda tensor: None))
"""Stands for a tensor that was changed, or computed in another way."""


def is_gone(recipe: Recipe | None) -> bool:
    """True if values were those of an earlier hook, or were changed."""
    return recipe is not None and not recipe.is_present
