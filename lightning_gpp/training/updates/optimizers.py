"""Optimizers that were configured on the full module and step one rank's parameters: index, state, merging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpp.errors import CheckpointError, ConfigError
from lightning_gpp.training.tensors.shards import local_parts
from lightning_gpp.wording import described

NOTHING: Final[dict[str, Any]] = {"state": {}, "param_groups": []}
"""The state dict of an optimizer without parameters; that of Lightning for modules without an optimizer is empty."""


class OptimizerIndex:
    """The parameters of an optimizer by name, in the user's order and groups.

    This indexes the optimizer's state in a checkpoint. Build it before parameters are dropped.

    Attributes:
        own: the parameters of this rank by group, while the groups have all.

    Raises:
        ConfigError: a parameter is not one of the module's.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = optimizer
        self.groups: list[list[str]] = []
        self.labels: list[list[str] | None] = []
        self._kept: list[list[str]] = []
        self.own: list[list[Tensor]] | None = None
        self._reading = False
        self._index(range(len(optimizer.param_groups)), module)

    def _index(self, numbers: Iterable[int], module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for number in numbers:
            group = self.optimizer.param_groups[number]
            found = [_name(parameter, names) for parameter in group["params"]]
            place = slice(number, number + 1)  # of a known group, or behind all for a new one
            self.groups[place], self._kept[place] = [found], [found]
            self.labels[place] = [group.get("param_names")]

    def refresh(self, module: nn.Module, names: set[str], tensors: Mapping[str, Tensor]) -> None:
        """Index parameter groups that a hook has added or replaced; of these keep the parameters in `names`."""
        with self.divided():
            self._refresh(module, names, tensors)

    def _refresh(self, module: nn.Module, names: set[str], tensors: Mapping[str, Tensor]) -> None:
        groups = self.optimizer.param_groups
        for known in (self.groups, self.labels, self._kept):
            del known[len(groups) :]
        fresh = [number for number in range(len(groups)) if not self._knows(number, tensors)]
        if fresh:
            self._index(fresh, module)
            self._keep(fresh, names, tensors)

    def _knows(self, number: int, tensors: Mapping[str, Tensor]) -> bool:
        """True if the group has the parameters that are kept of the one with its number."""
        kept = self._kept[number] if number < len(self._kept) else None
        found = [id(parameter) for parameter in self.optimizer.param_groups[number]["params"]]
        return kept is not None and found == [id(tensors.get(name)) for name in kept]

    @contextmanager
    def undivided(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the optimizer's groups have all parameters, in the user's order, with those of other ranks.

        A step of the optimizer, and code inside of `divided`, have those of this rank.
        """
        groups, before = self.optimizer.param_groups[: len(self.groups)], self.own
        self.own = before or [group["params"] for group in groups]
        whole = [[tensors[name] for name in names] for names in self.groups]
        try:
            with _with_lists(groups, whole), self._divided_steps():
                yield
        finally:
            self.own = before

    @contextmanager
    def _divided_steps(self) -> Iterator[None]:
        """Inside, steps of the optimizer are those of this rank's parameters."""
        step = ExitStack()

        def begin(*_: Any) -> None:
            step.enter_context(self.divided())

        def end(*_: Any) -> None:
            step.close()

        hooks = self.optimizer.register_step_pre_hook(begin), self.optimizer.register_step_post_hook(end)
        try:
            with step:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Inside, the optimizer's groups have the parameters of this rank, also where they are `undivided`."""
        own, self.own = self.own, None
        try:
            with nullcontext() if own is None else _with_lists(self.optimizer.param_groups[: len(own)], own):
                yield
        finally:
            self.own = own

    def keep(self, names: set[str], tensors: Mapping[str, Tensor], shards: Mapping[str, Tensor] | None = None) -> None:
        """Drop all other parameters from the optimizer, with their state.

        Args:
            names: names of the parameters that it steps.
            tensors: their current tensors; placing them may have made new ones.
            shards: sharded parameters of the module, whose state is sharded, too.
        """
        self._keep(range(len(self.groups)), names, tensors, shards)

    def _keep(
        self,
        numbers: Iterable[int],
        names: set[str],
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, Tensor] | None = None,
    ) -> None:
        states = self.optimizer.state
        for number in numbers:
            group, known = self.optimizer.param_groups[number], self.groups[number]
            places = [place for place, name in enumerate(known) if name in names]
            before = dict(zip(known, group["params"], strict=True))
            group["params"] = [tensors[known[place]] for place in places]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][place] for place in places]
            for name, parameter in before.items():
                state = states.pop(parameter, None)
                if name in names and state is not None:
                    states[tensors[name]] = local_parts(state, (shards or {}).get(name))
            self._kept[number] = [name for name in known if name in names]

    @property
    def kept(self) -> set[str]:
        """Names of the parameters that this rank steps."""
        return {name for group in self._kept for name in group}

    @property
    def names(self) -> list[str]:
        """Names of all parameters of the optimizer."""
        return [name for group in self.groups for name in group]

    def guard(self) -> RemovableHandle | None:
        """Let `optimizer.state_dict()` be an error outside of this class: it has the parameters of this rank only.

        Returns:
            A handle whose `remove` ends that; None for an optimizer without hooks, such as a wrapper of another one
                that never calls `Optimizer.__init__`.
        """
        try:
            return self.optimizer.register_state_dict_pre_hook(self._refuse)
        except AttributeError:
            return None

    def _refuse(self, optimizer: Optimizer) -> None:
        if not self._reading:
            raise ConfigError(
                f"{type(optimizer).__name__}.state_dict() was called during training, where the optimizer of each rank "
                "has the parameters of its stages only. Let all ranks call "
                "trainer.strategy.optimizer_state(optimizer) together (engine.optimizer_state_dict in a loop of your "
                "own): global rank 0 gets the state of all parameters."
            )

    def own_state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict as it is on this rank."""
        self._reading = True
        try:
            return {**NOTHING, **self.optimizer.state_dict()}
        finally:
            self._reading = False

    def state(self) -> dict[str, Any]:
        """This rank's state by parameter name."""
        names, state = [name for group in self._kept for name in group], self.own_state_dict()["state"]
        return {name: state[place] for place, name in enumerate(names) if place in state}

    def move(self, device: torch.device) -> None:
        """Move the state of the optimizer to a device; step counters stay where the optimizer wants them."""
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)

    def ordered_state(self) -> dict[str, Any]:
        """The same in an order that is equal on all ranks."""
        state = self.state()
        return {name: state[name] for name in self.names if name in state}

    def put(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the parameters with these names by other tensors and state."""
        self.optimizer.state.clear()
        for group, names in zip(self.optimizer.param_groups, self._kept, strict=True):
            group["params"] = [tensors[name] for name in names]
        for name, values in state.items():
            self.optimizer.state[tensors[name]] = values

    def merged(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict as on one device, from states by name."""
        return {
            "state": {place: state[name] for place, name in enumerate(self.names) if name in state},
            "param_groups": self._merged_groups(),
        }

    def _merged_groups(self) -> list[dict[str, Any]]:
        merged, start = [], 0
        groups = self.own_state_dict()["param_groups"]
        for group, names, labels in zip(groups, self.groups, self.labels, strict=True):
            extra = {} if labels is None else {"param_names": labels}
            merged.append({**group, **extra, "params": list(range(start, start + len(names)))})
            start += len(names)
        return merged

    def load(self, full: Mapping[str, Any], shards: Mapping[str, Tensor] | None = None) -> None:
        """Load this rank's part of a state dict of the undivided optimizer.

        Args:
            full: the state dict.
            shards: the module's parameters, which may be sharded.

        Raises:
            CheckpointError: the state is of another optimizer.
        """
        full = {**NOTHING, **full}
        self._check_fits(full)
        places = {name: group["params"][i] for group, known in self._pairs(full) for i, name in enumerate(known)}
        if unknown := set(full["state"]) - set(places.values()):
            raise CheckpointError(
                f"The optimizer state has entries {sorted(unknown)} for only {len(places)} parameters."
            )
        kept = enumerate(name for group in self._kept for name in group)
        found = {i: (name, full["state"][places[name]]) for i, name in kept if places[name] in full["state"]}
        state = {i: local_parts(values, (shards or {}).get(name)) for i, (name, values) in found.items()}
        try:
            self.optimizer.load_state_dict({"state": state, "param_groups": self._local_groups(full)})
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"The optimizer's state in the checkpoint (ckpt_path) is not one of {type(self.optimizer).__name__}: "
                f"{described(error)}. Resume with the optimizer that wrote it, or load the weights alone, before "
                "training: model.load_state_dict(torch.load(path)['state_dict'])."
            ) from error

    def _local_groups(self, full: Mapping[str, Any]) -> list[dict[str, Any]]:
        groups, start = [], 0
        for (group, known), kept in zip(self._pairs(full), self._kept, strict=True):
            local = {**group, "params": list(range(start, start + len(kept)))}
            if "param_names" in group:
                wanted = set(kept)
                local["param_names"] = [
                    label for label, name in zip(group["param_names"], known, strict=True) if name in wanted
                ]
            groups.append(local)
            start += len(kept)
        return groups

    def _pairs(self, full: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
        return list(zip(full["param_groups"], self.groups, strict=True))

    def _check_fits(self, full: Mapping[str, Any]) -> None:
        sizes = [len(group["params"]) for group in full.get("param_groups", [])]
        expected = [len(names) for names in self.groups]
        if sizes != expected:
            raise CheckpointError(
                f"The checkpoint's optimizer has parameter groups of {sizes} parameters, the optimizer of this run "
                f"({type(self.optimizer).__name__}) has {expected}. Resume with the optimizer that wrote it, or load "
                "only the weights."
            )


@contextmanager
def _with_lists(groups: Sequence[dict[str, Any]], lists: Sequence[list[Tensor]]) -> Iterator[None]:
    """Inside, groups have other parameters."""
    before = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, lists, strict=True):
            group["params"] = parameters
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise ConfigError(
            f"An optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the module's. Make the "
            "optimizer of this module's parameters; what is outside belongs on the module, so that a stage can own it."
        )
    return names[id(parameter)]


def is_first_order(optimizer: Optimizer) -> bool:
    """True for an optimizer that evaluates the model once per step, and works on a part of the parameters."""
    return not isinstance(optimizer, LBFGS)


def check_first_order(optimizer: Optimizer) -> None:
    """Raise ConfigError if the optimizer cannot work on a part of the parameters."""
    if not is_first_order(optimizer):
        raise ConfigError(
            "configure_optimizers returned L-BFGS, which evaluates the model several times per step and takes inner "
            "products over all parameters, of which every rank has only its own. Use a first-order optimizer."
        )
