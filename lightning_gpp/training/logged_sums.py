"""Values that a step logs with `reduce_fx="sum"`: which of them add up over micro-batches, and which do not.

A count of right answers adds up; the number of the batch is the same for every micro-batch, and a mean loss is a mean
of theirs. The name does not tell, so both are tried on a few samples, undivided and in micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_PLACE = 4
"""The place of `reduce_fx` among the positional arguments of `self.log` after name and value."""


class LoggedSums:
    """The values of such calls, by name, in the order of the runs of the step.

    Attributes:
        values: values of each name.
        plain: names that were logged as plain numbers.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.plain: set[str] = set()

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Inside, a copy of a module whose logs are ignored has these calls recorded."""
        ignored: dict[str, Any] = {name: vars(module).pop(name) for name in ("log", "log_dict") if name in vars(module)}
        if ignored:
            vars(module)["log"] = self._record
        try:
            yield
        finally:
            vars(module).pop("log", None)
            vars(module).update(ignored)

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        reduction = kwargs.get("reduce_fx", args[_PLACE] if len(args) > _PLACE else "mean")
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and getattr(reduction, "__name__", reduction) == "sum":
            self.values.setdefault(name, []).append(float(value))
            if not isinstance(value, Tensor):
                self.plain.add(name)


def repeated_values(whole: LoggedSums, parts: LoggedSums, near: Callable[[float, float], bool]) -> set[str]:
    """The names whose values of micro-batches do not add up to the undivided one: their mean is it.

    A plain number that is zero everywhere counts as one: it was not computed from samples.
    """
    found = set()
    for name, values in parts.values.items():
        given = whole.values.get(name, [])
        averages = len(given) == 1 and near(sum(values) / len(values), given[0])
        if averages and (name in parts.plain or not near(sum(values), given[0])):
            found.add(name)
    return found
