"""The entry of `fabric.save` and `fabric.load` besides the user's objects, and parts of optimizers in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_gpp.checkpoints.layout import KEY
from lightning_gpp.training.engine import Engine


@dataclass(frozen=True, slots=True)
class DividedOptimizer:
    """An optimizer of a divided module, as `fabric.load` finds it: it loads this rank's part of a state."""

    engine: Engine
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        """The undivided state."""
        return self.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the undivided optimizer."""
        self.engine.load_optimizer_state_dict(self.optimizer, state)


def loaded_into(state: dict[str, Any], engine: Engine | None, load: Callable[[dict[str, Any]], Any]) -> Any:
    """Load into the objects of a state, optimizers of a divided module included; other entries are replaced in it."""
    divided = {name for name, each in state.items() if isinstance(each, Optimizer) and engine is not None}
    wrapped = {name: DividedOptimizer(engine, each) if name in divided else each for name, each in state.items()}  # type: ignore[arg-type]
    rest = load(wrapped)
    state.update({name: each for name, each in wrapped.items() if name not in divided})
    return rest


def entry_for(engine: Engine | None) -> dict[str, Any]:
    """This library's entry of a checkpoint."""
    return {} if engine is None else {KEY: {"seed": engine.job.seed, "step": engine.num_steps}}
