"""The states of a divided module and its optimizers: what a checkpoint saves, and what it gives back to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gpp.errors import ConfigError
from lightning_gpp.training.asynchronous import Asynchronous
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.host import Job
from lightning_gpp.training.runner import Runner
from lightning_gpp.training.tensors.checkpoint import (
    check_held,
    load_state,
    own_optimizer_state,
    own_state,
    saved_here,
    values_loaded,
    values_saved,
    whole_optimizer_state,
    whole_state,
)
from lightning_gpp.training.tensors.parameters import drop, tensors_of
from lightning_gpp.training.tensors.replicas import Layout, Replicas
from lightning_gpp.training.updates.gradients import StageGradients
from lightning_gpp.training.updates.optimizers import OptimizerIndex


class DividedStates:
    """The states of an `Engine`, which has these attributes. All ranks call its methods together."""

    job: Job
    module: nn.Module
    control: Control
    device: torch.device
    num_steps: int
    _layout: Layout
    _incoming: Incoming
    _indices: Sequence[OptimizerIndex]
    _replicas: Replicas | None
    _asynchronous: Asynchronous | None
    _gradients: StageGradients | None
    _runner: Runner
    _released: bool

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """The state dict of the undivided module; complete on global rank 0, elsewhere with foreign tensors.

        `sharded`: nothing is sent; every rank has the entries that it saves, and meta tensors for others.
        """
        if self._released:
            check_held(self.module, self._layout.placement, self.control)
        with self.job.shown():
            return (own_state if sharded else whole_state)(self.module, self._layout.placement, self.control)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the undivided module; every rank keeps its part.

        Raises:
            CheckpointError: keys or shapes do not fit.
        """
        with self.job.shown():
            load_state(self.module, state, strict)
        drop(self.module, self._layout.placement.elsewhere(self.control), self.device)
        self._incoming.follow()

    def divide(self, copy: nn.Module) -> None:
        """Leave this rank's part of a copy of the module, which was made before set-up, as in the module itself."""
        drop(copy, self._layout.placement.elsewhere(self.control), self.device)

    def divides(self, optimizer: Optimizer) -> bool:
        """True for an optimizer of which every rank has a part."""
        return any(index.optimizer is optimizer for index in self._indices)

    def optimizer_state_dict(self, optimizer: Optimizer, *, sharded: bool = False) -> dict[str, Any]:
        """The state dict of the undivided optimizer, in the user's indexing; complete on global rank 0.

        `sharded`: nothing is sent; every rank has the entries that it saves.
        """
        state = own_optimizer_state if sharded else whole_optimizer_state
        index = self._index(optimizer)
        with self.job.shown(), index.divided():
            return state(index, tensors_of(self.module), self._layout.placement, self.control, self._owned)

    @property
    def _owned(self) -> bool:
        """True if no two ranks step the same parameter."""
        return self._replicas is not None and self._replicas.sharding == "zero1"

    def part_of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer as it is on this rank, in an indexing of its own."""
        return self._index(optimizer).own_state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state dict of the undivided optimizer; every rank keeps its part.

        Raises:
            CheckpointError: the state is of another optimizer.
        """
        index = self._index(optimizer)
        if self._replicas is not None:
            self._replicas.follow()  # a callback may have made the groups of the checkpoint again
        with self.job.shown(), index.divided():
            index.load(state, tensors_of(self.module))
        index.move(self.device)

    def pipeline_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """The state of a pipeline that does not flush, except module and optimizers; complete on global rank 0.

        `sharded`: values are those that this rank saves.
        The mini-batches in the pipeline are dropped: it fills again, as that of a run that resumes.
        """
        asynchronous = self._asynchronous
        if asynchronous is None:
            return {}
        self._runner.give_up(self.num_steps)
        saved = asynchronous.policy.saved()
        names = saved_here(self._layout.placement, self.control)
        values = values_saved(saved, self.module, names, self.control, whole=not sharded)
        norms = {} if self._gradients is None else self._gradients.state()
        return {**asynchronous.facts(), "step": self.num_steps, "values": values, "norms": norms}

    def load_pipeline_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `pipeline_state_dict`; every rank keeps its part."""
        if self._asynchronous is not None and state:
            self.num_steps = state["step"]
            here = self._layout.placement.names_on(self.control.device)
            self._asynchronous.take(state, values_loaded(state["values"], self.module, here))
            if self._gradients is not None:
                self._gradients.load(state["norms"])

    def _index(self, optimizer: Optimizer) -> OptimizerIndex:
        for index in self._indices:
            if index.optimizer is optimizer:
                return index
        raise ConfigError(
            f"The {type(optimizer).__name__} is not one of the optimizers that the engine was set up with."
        )
