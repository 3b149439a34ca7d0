"""The states of a divided module and its optimizers: what a checkpoint saves, under original names, merged on global
rank 0, or of every rank what it alone holds; and what it gives back to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp._compat.torch import pytree
from lightning_gpp.checkpoints.stored import StoredValues
from lightning_gpp.errors import CheckpointError, ConfigError
from lightning_gpp.runtime.named_tensors import replace_tensors, tensors_of, with_values, without_memory
from lightning_gpp.training.asynchronous import Asynchronous
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.host import Job
from lightning_gpp.training.runner import Runner
from lightning_gpp.training.tensors.foreign import Foreign
from lightning_gpp.training.tensors.parameters import Layout, drop, materialise
from lightning_gpp.training.tensors.replicas import Replicas
from lightning_gpp.training.tensors.shards import is_shard, loadable, state_shard, whole_states, whole_values
from lightning_gpp.training.updates.gradients import StageGradients
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from lightning_gpp.wording import some


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
            check_held(self.module, self._layout, self.control)
        with self.job.shown():
            return (own_state if sharded else whole_state)(self.module, self._layout, self.control)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the undivided module; every rank keeps its part.

        Raises:
            CheckpointError: keys or shapes do not fit.
        """
        with self.job.shown():
            load_state(self.module, state, strict)
        drop(self.module, self._layout.elsewhere(self.control), self.device)
        self._incoming.follow()

    def divide(self, copy: nn.Module) -> None:
        """Leave this rank's part of a copy of the module, which was made before set-up, as in the module itself."""
        drop(copy, self._layout.elsewhere(self.control), self.device)

    def divides(self, optimizer: Optimizer) -> bool:
        """True for an optimizer of which every rank has a part."""
        return any(index.optimizer is optimizer for index in self._indices)

    def optimizer_state_dict(self, optimizer: Optimizer, *, sharded: bool = False) -> dict[str, Any]:
        """The state dict of the undivided optimizer, in the user's indexing; complete on global rank 0.

        `sharded`: nothing is sent; every rank has the entries that it saves.
        """
        index = self._index(optimizer)
        with self.job.shown(), index.divided():
            return index.merged(self._own_states(index) if sharded else self._whole_states(index))

    @property
    def _owned(self) -> bool:
        """True if no two ranks step the same parameter."""
        return self._replicas is not None and self._replicas.sharding == "zero1"

    def _own_states(self, index: OptimizerIndex) -> dict[str, dict[str, Any]]:
        """An optimizer's states that this rank saves, by parameter; of shards its own, as DTensors."""
        tensors, found = tensors_of(self.module), dict[str, dict[str, Any]]()
        for name, state in index.state().items():
            shards = {key: state_shard(value, tensors.get(name)) for key, value in state.items()}
            found[name] = {key: value for key, value in shards.items() if self._saves(name, value)}
        return found

    def _saves(self, name: str, value: Any) -> bool:
        if self._owned:
            return is_shard(value) or self.control.member == 0
        return _is_saved(name, value, self._layout, self.control)

    def _whole_states(self, index: OptimizerIndex) -> dict[str, Any]:
        """An optimizer's states by parameter, unsharded; complete on global rank 0."""
        state, control = index.ordered_state(), self.control
        stepped = state.keys() if control.member == 0 else ()
        wanted = stepped if self._owned else self._layout.saved_here(control)
        mine = whole_states(state, tensors_of(self.module), wanted)
        return merge(mine, control, control.num_pipelines if self._owned else 1)

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
        named = {p: name for name, p in self._named(self._layout.saved_here(self.control)).items()}
        saved = ((kind, p, value) for kind, of in asynchronous.policy.saved().items() for p, value in of.items())
        mine = {f"{kind} {named[p]}": value for kind, p, value in saved if p in named}
        values: dict[str, dict[str, Tensor]] = {}
        for key, value in (mine if sharded else merge(mine, self.control)).items():
            kind, name = key.split(" ")
            values.setdefault(kind, {})[name] = value
        norms = {} if self._gradients is None else self._gradients.state()
        return {**asynchronous.facts(), "step": self.num_steps, "values": values, "norms": norms}

    def _named(self, names: set[str]) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if name in names}

    def load_pipeline_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `pipeline_state_dict`; every rank keeps its part."""
        if self._asynchronous is not None and state:
            self.num_steps = state["step"]
            here = self._named(self._layout.names_on(self.control.device))
            values = {
                kind: {here[name]: of[name].to(here[name].device, copy=True) for name in of if name in here}
                for kind, of in state["values"].items()
            }
            self._asynchronous.take(state, values)
            if self._gradients is not None:
                self._gradients.load(state["norms"])

    def _index(self, optimizer: Optimizer) -> OptimizerIndex:
        for index in self._indices:
            if index.optimizer is optimizer:
                return index
        raise ConfigError(
            f"The {type(optimizer).__name__} is not one of the optimizers that the engine was set up with."
        )


def whole_state(module: nn.Module, layout: Layout, control: Control) -> dict[str, Any]:
    """The module's state dict. On global rank 0 every entry has values; elsewhere, those of other ranks are
    foreign.

    All ranks must call it.
    """
    tensors = tensors_of(module)
    names = {id(tensor): name for name, tensor in tensors.items()}
    state = module.state_dict(keep_vars=True)
    made = _made_states(module, state, layout) if control.pipeline == control.member == 0 else {}
    received = merge({**made, **whole_values(tensors, layout.saved_here(control))}, control)
    for key, value in state.items():
        if isinstance(value, Tensor):
            own = without_memory(value) if is_shard(value) else value
            state[key] = received.get(names.get(id(value), ""), own.detach())
    return state | {name: value for name, value in received.items() if name not in tensors}


def check_held(module: nn.Module, layout: Layout, control: Control) -> None:
    """Check, after a run, that ranks still have what they had in it. All ranks call this.

    Raises:
        CheckpointError: a later run has placed parameters or buffers on others.
    """
    tensors = tensors_of(module)
    lacking = [name for name in layout.held_by(control.device) if name in tensors and tensors[name].is_meta]
    lost = [name for names in control.gather_all(lacking) for name in names]
    if lost:
        raise CheckpointError(
            f"This trainer's run is over, and a later one has placed {some(lost)} on other ranks. Save before the "
            "later run, or by its trainer."
        )


def _is_saved(name: str, value: Any, layout: Layout, control: Control) -> bool:
    """True if this process saves a tensor: of what replicas shard every shard, of what members shard those of one
    replica.
    """
    if is_shard(value):
        return control.num_members == 1 or name in layout.held_first(control)
    return name in layout.saved_here(control)


def _made_states(module: nn.Module, state: Mapping[str, Any], layout: Layout) -> dict[str, Tensor]:
    """The entries of the module's state dict that are buffers which hooks have made since parameters were placed."""
    names = {name for name, buffer in module.named_buffers() if name not in layout.devices and not buffer.is_meta}
    return {name: state[name].detach() for name in names & state.keys()}


def own_state(module: nn.Module, layout: Layout, control: Control) -> dict[str, Any]:
    """The module's state dict, in which tensors that other ranks save have no memory."""
    names = {id(tensor): name for name, tensor in tensors_of(module).items()}
    state = module.state_dict(keep_vars=True)
    made = _made_states(module, state, layout) if control.pipeline == control.member == 0 else {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            here = key in made or _is_saved(names.get(id(value), ""), value, layout, control)
            state[key] = (value if here else without_memory(value)).detach()
    return state


def merge(mine: Mapping[str, Any], control: Control, num_pipelines: int = 1) -> dict[str, Any]:
    """The entries of all ranks of the first pipelines on global rank 0, elsewhere the rank's own.

    All ranks must call it. First members have what their device saves.
    """
    others, merged = range(1, control.num_devices * num_pipelines), dict(mine)
    if control.first:
        for rank in others:
            merged.update(control.receive_tree(src=control.mesh.process(rank)))
    elif control.rank in others and control.member == 0:
        control.send_tree(merged, dst=0)
    return merged


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict of the undivided module into a module that may have parts without memory.

    Parts without memory get it, but from a folder only what has memory is loaded: `settle` reads the rest.

    Raises:
        CheckpointError: keys or shapes do not fit.
    """
    if not isinstance(state, StoredValues):
        tensors = tensors_of(module)
        names = {id(tensor): name for name, tensor in tensors.items()}
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and value.is_meta and key in state:
                materialise(module, [names[id(value)]])
    own = module.state_dict(keep_vars=True)
    try:
        module.load_state_dict({key: loadable(state, key, own.get(key)) for key in state}, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint does not fit {type(module).__name__} (ckpt_path). Load one of the same model. {error}"
        ) from error


def make_whole(module: nn.Module, layout: Layout, control: Control) -> None:
    """Give global rank 0 the values of all parameters and buffers, on the CPU. All ranks must call it."""
    tensors = tensors_of(module)
    held = layout.held_by(control.device)
    mine = {name: tensors[name].detach() for name in held if name in tensors}  # hooks take some out of the module
    received = merge(mine if control.pipeline == 0 else {}, control)
    if not control.first:
        return
    lacking = [name for name, tensor in tensors.items() if tensor.is_meta]
    found = [name for name in lacking if name in received]  # not in buffers that hooks made from values of others
    replace_tensors(module, [(tensors[name], with_values(tensors[name], received[name])) for name in found])


def fill(tree: Any, control: Control) -> Any:
    """The tree with the values of its foreign tensors on global rank 0; all ranks call this, with trees alike."""
    pairs, structure = pytree.tree_flatten_with_path(tree)
    leaves = {pytree.keystr(path): leaf for path, leaf in pairs}
    missing = control.broadcast({name: min(leaf.ranks) for name, leaf in leaves.items() if isinstance(leaf, Foreign)})
    mine = {name: leaves[name] for name, source in missing.items() if source == control.mesh.own_process}
    received = merge(mine, control)
    return pytree.tree_unflatten([received.get(name, leaf) for name, leaf in leaves.items()], structure)
