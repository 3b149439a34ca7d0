"""Numbers in which the training step counts its calls: with micro-batches they run ahead of those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from lightning_gpp.capture.attributes import Attribute, dotted
from lightning_gpp.training.control import Control

IN_A_ROW: Final = 3
"""Mini-batches in which a number grows by one per micro-batch before it counts as one of calls."""


class CountedCalls:
    """Warns of whole numbers that grow by one per micro-batch, on the rank that runs the step."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._values: dict[str, list[int]] = {}
        self._parts: list[int] = []
        self._told: set[str] = set()

    def tell(self, changed: Mapping[Attribute, Any], parts: int) -> None:
        """Warn of each number once.

        Args:
            changed: what the step has changed in a mini-batch.
            parts: number of its micro-batches, which have several samples each.
        """
        now = {name: value for key, value in changed.items() for name, value in _numbers(dotted(key), value)}
        self._values = {name: [*self._values.get(name, [])[-IN_A_ROW:], value] for name, value in now.items()}
        self._parts = [*self._parts, parts][-IN_A_ROW:]
        for name, values in sorted(self._values.items()):
            steps = [after - before for before, after in pairwise(values)]
            if name not in self._told and steps == self._parts and len(steps) == IN_A_ROW and max(steps) > 1:
                self._told.add(name)
                self._control.warn(
                    f"training_step counts its calls in {name}: it runs once per micro-batch, so that the number grows "
                    f"by {max(steps)} per mini-batch, and what depends on it comes earlier than in one process. Count "
                    "mini-batches in on_train_batch_start, use batch_idx or trainer.global_step, or let the step run "
                    "as a whole (strategy.step=whole)."
                )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """The whole numbers in an attribute: its value, or values of a dictionary."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}[{key!r}]", item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value
