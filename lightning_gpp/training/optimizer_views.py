"""The states of an optimizer as user code sees them, whose parameters are on several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from lightning_gpp.errors import ForeignTensorError


class StateElsewhere(dict[str, Any]):
    """The state of a parameter that this rank has none of: another rank steps it, or nobody has done so yet."""

    def __missing__(self, name: str) -> NoReturn:
        raise ForeignTensorError(
            f"optimizer.state has no {name!r} of this parameter on this rank: the rank that steps the parameter has "
            "it, unless nobody has stepped it yet. Let all ranks call trainer.strategy.optimizer_state(optimizer) "
            "together; global rank 0 gets the states of all."
        )


@contextmanager
def states_elsewhere(optimizer: Optimizer) -> Iterator[None]:
    """Inside, reading a value that is not in the state of a parameter raises ForeignTensorError."""
    states = optimizer.state
    if not isinstance(states, defaultdict):
        yield
        return
    before, states.default_factory = states.default_factory, StateElsewhere
    try:
        yield
    finally:
        states.default_factory = before
        for parameter in [key for key, state in states.items() if isinstance(state, StateElsewhere) and not state]:
            del states[parameter]
