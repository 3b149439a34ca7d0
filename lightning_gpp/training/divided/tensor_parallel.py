"""Tensor parallelism inside a stage: the division of a module by `parallelize_module`, and its use by stages.

    parallelize_module     the user's, in configure_model: makes DTensors and hooks            on all processes
    lifted                 takes both out again: the module is plain; so it is captured, planned, checked and placed
    TensorParallel.divide  leaves every member of a device its part of the parameters, as plain tensors
    Applied                gives modules DTensors, made of these parts, and hooks while their stage computes

So whatever looks at parameters elsewhere (optimizers, reductions and norms of gradients) sees plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_gpp._compat.torch import HookTables, buffers_of, forget_division, hook_tables, parameters_of
from lightning_gpp.capture.isolate import private_copy
from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.named_tensors import (
    replace_tensors,
    replaced_tensors,
    tensors_of,
    with_values,
    without_memory,
)
from lightning_gpp.runtime.stage import StageModule
from lightning_gpp.stages.step import InContext
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.foreign import Foreign
from lightning_gpp.wording import named

_HOOKS_OF = "torch.distributed.tensor"
"""The package whose hooks on modules are tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a tensor among the members of a device. `dim`: the one that is cut; None: all have all of it."""

    dim: int | None
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def placements(self) -> list[Placement]:
        """The same for DTensors."""
        return [Replicate() if self.dim is None else Shard(self.dim)]

    def part(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """A copy of the part of member `number` of `count`, as DTensors are cut: the last ones may be smaller."""
        if self.dim is None:
            return tensor
        length = self.shape[self.dim]
        size = -(-length // count)
        start = min(number * size, length)
        return tensor.narrow(self.dim, start, min(size, length - start)).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The division of a module's tensors, by name, and the hooks of its modules, by path.

    `mesh`: the members of this device. `regions`: modules that are called whole, with the reasons, once they are known.
    """

    mesh: DeviceMesh
    divisions: Mapping[str, Division]
    hooks: Mapping[str, HookTables]
    regions: dict[str, str] = field(default_factory=dict)

    @property
    def degree(self) -> int:
        """Number of members."""
        return int(self.mesh.size())

    @property
    def cut(self) -> dict[str, int]:
        """The tensors of which every member has a part, by name, with the dimension along which they are cut."""
        return {name: division.dim for name, division in self.divisions.items() if division.dim is not None}

    # -- parameters ---------------------------------------------------------------------------------------------------

    def divide(self, module: nn.Module) -> None:
        """Leave this member its parts of the tensors that have values."""
        number = self.mesh.get_local_rank()
        swaps = list[tuple[Tensor, Tensor]]()
        for name, tensor in self._of(module, divided=False):
            part = self.divisions[name].part(tensor.detach(), number, self.degree)
            swaps.append((tensor, with_values(tensor, part)))
        replace_tensors(module, swaps)

    def undivide(self, module: nn.Module) -> None:
        """Give every member undivided tensors on the CPU, with their gradients. All members call this together."""
        swaps = list[tuple[Tensor, Tensor]]()
        for name, tensor in self._of(module, divided=True):
            whole = with_values(tensor, self._whole(name, tensor.detach()))
            if tensor.grad is not None:
                whole.grad = self._whole(name, tensor.grad)
            swaps.append((tensor, whole))
        replace_tensors(module, swaps)

    def shown(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which the module has DTensors, with the memory of the parts, for what saves or reads shapes."""
        parts = self._of(module, divided=True)
        swaps = [(tensor, with_values(tensor, self.joined(name, tensor.detach()))) for name, tensor in parts]
        return replaced_tensors(module, swaps)

    def joined(self, name: str, part: Tensor) -> DTensor:
        """The tensor with this name, of this member's part; a backward through it ends at the part."""
        division = self.divisions[name]
        return DTensor.from_local(
            part, self.mesh, division.placements, run_check=False, shape=division.shape, stride=division.stride
        )

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return self.joined(name, part).full_tensor().cpu()

    def _of(self, module: nn.Module, *, divided: bool) -> list[tuple[str, Tensor]]:
        """The cut tensors with values that are divided at present, or those that are not; the same on all members."""
        found = list[tuple[str, Tensor]]()
        if self.degree == 1:
            return found
        for name, tensor in tensors_of(module).items():
            if name in self.cut and not tensor.is_meta:
                is_whole = tensor.shape == self.divisions[name].shape
                found += [(name, tensor)] if is_whole != divided else []
        return found

    # -- stages -------------------------------------------------------------------------------------------------------

    def stages(
        self, stages: Sequence[StageModule], states: Sequence[Collection[str]], module: nn.Module
    ) -> list[StageModule]:
        """The stages, with DTensors in the modules while they compute. `states`: names of the tensors of each."""
        if self.degree == 1:
            return list(stages)
        pairs = zip(stages, states, strict=True)
        return [InContext(stage, Applied(self, module, names, stage.parts)) for stage, names in pairs]

    def outline(self, module: nn.Module, *, applied: bool = True) -> nn.Module:
        """A copy without memory. `applied`: with DTensors and hooks for good."""
        number = self.mesh.get_local_rank()

        def made(name: str, tensor: Tensor) -> Tensor:
            empty = without_memory(tensor)
            if not applied or name not in self.divisions:
                return empty
            part = self.divisions[name].part(empty.detach(), number, self.degree)
            return with_values(tensor, self.joined(name, part))

        copied = private_copy(module, made)
        for path, tables in self.hooks.items() if applied else ():
            _add(copied.get_submodule(path), tables)
        return copied


class Applied:
    """DTensors and hooks for the modules of one stage.

    Args:
        parallel: the division.
        module: the module with the parts.
        names: parameters and buffers of the stage.
        parts: modules of the stage.
    """

    def __init__(
        self, parallel: TensorParallel, module: nn.Module, names: Collection[str], parts: Collection[nn.Module]
    ) -> None:
        self._parallel = parallel
        self._places = list(_places(module, {name for name in names if name in parallel.divisions}))
        inside = {id(part) for part in parts}
        found = ((module.get_submodule(path), tables) for path, tables in parallel.hooks.items())
        self._hooks = [(part, tables) for part, tables in found if id(part) in inside]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the modules compute on this member's parts."""
        plain = [(table, key, table[key]) for _, table, key in self._places]
        joined: dict[int, DTensor] = {}
        for name, table, key in self._places:
            part = table[key]
            if id(part) not in joined:
                joined[id(part)] = self._parallel.joined(name, part)
            table[key] = joined[id(part)]
        for part, tables in self._hooks:
            _add(part, tables)
        try:
            yield
        finally:
            for table, key, part in plain:
                table[key] = part
            for part, tables in self._hooks:
                _remove(part, tables)


def _places(module: nn.Module, names: Collection[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The tables and keys of tensors in their modules, with their canonical names; tied ones have several."""
    known = {id(tensor): name for name, tensor in tensors_of(module).items() if name in names}
    for part in module.modules():
        for table in (parameters_of(part), buffers_of(part)):
            yield from ((known[id(tensor)], table, key) for key, tensor in table.items() if id(tensor) in known)


@contextmanager
def dividing(module: nn.Module, processes: Sequence[int]) -> Iterator[list[TensorParallel | None]]:
    """Inside, a module's configure_model runs; afterwards the list has what was lifted. `processes`: see `lifted`."""
    replace_tensors(module, [(t, without_memory(t)) for t in tensors_of(module).values() if t.is_meta])
    ties, found = ties_of(module), list[TensorParallel | None]()
    yield found
    found.append(lifted(module, processes))
    check_ties(ties, module)


# -- what parallelize_module did --------------------------------------------------------------------------------------


def lifted(module: nn.Module, processes: Sequence[int]) -> TensorParallel | None:
    """Take the division that `parallelize_module` has made out of a module, which then has plain tensors on the CPU.

    All members of a device call this together.

    Args:
        module: the module.
        processes: the members of this device.

    Returns:
        None if the module has no DTensors.

    Raises:
        ConfigError: a tensor is divided among other processes, or in another way than along a dimension.
    """
    _check_unsharded(module)
    tensors = {name: tensor for name, tensor in tensors_of(module).items() if isinstance(tensor, DTensor)}
    if not tensors:
        return None
    divisions = {name: _division(name, tensor, processes) for name, tensor in tensors.items()}
    replace_tensors(module, [(tensor, with_values(tensor, _undivided(tensor))) for tensor in tensors.values()])
    hooks = {path: _taken(part) for path, part in module.named_modules()}
    mesh = next(iter(tensors.values())).device_mesh
    return TensorParallel(mesh, divisions, {path: tables for path, tables in hooks.items() if any(tables)})


def _undivided(tensor: DTensor) -> Tensor:
    whole: Tensor = tensor.full_tensor().detach()
    return whole if whole.is_meta else whole.cpu()


def _check_unsharded(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, FSDPModule):
            raise ConfigError(
                f"configure_model applies fully_shard to {named(path)}, but stages place their parameters "
                "themselves. Leave it out; replicas shard by strategy.sharding (without tensor parallelism)."
            )


def _division(name: str, tensor: DTensor, processes: Sequence[int]) -> Division:
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.mesh.flatten().tolist() != list(processes) or mesh.ndim != 1:
        raise ConfigError(
            f"configure_model divides {name!r} among the processes {mesh.mesh.tolist()}, but a device of the pipeline "
            f"consists of {list(processes)}. Give parallelize_module the mesh self.device_mesh['tensor_parallel']."
        )
    (placement,) = placements
    if type(placement) not in (Shard, Replicate):
        raise ConfigError(
            f"configure_model gives {name!r} the placement {placement}; parameters can be sharded along a dimension "
            "(Shard) or replicated (Replicate). Choose another style in the plan of parallelize_module."
        )
    dim = placement.dim % tensor.ndim if isinstance(placement, Shard) else None
    return Division(dim, tensor.shape, tuple(tensor.stride()))


def _taken(part: nn.Module) -> HookTables:
    """Take the hooks of tensor parallelism out of a module."""
    found = tuple({key: hook for key, hook in table.items() if _is_parallel(hook)} for table in hook_tables(part))
    keys = {key for table in found for key in table}
    taken = tuple({key: table[key] for key in keys if key in table} for table in hook_tables(part))
    _remove(part, taken)
    forget_division(part)
    return taken


def _is_parallel(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_HOOKS_OF)


def _add(part: nn.Module, tables: HookTables) -> None:
    for table, entries in zip(hook_tables(part), tables, strict=True):
        table.update(entries)


def _remove(part: nn.Module, tables: HookTables) -> None:
    for table, entries in zip(hook_tables(part), tables, strict=True):
        for key in entries:
            table.pop(key, None)


def check_divided(degree: int, parallel: TensorParallel | None) -> None:
    """Raise ConfigError if devices have several processes, between which nothing of the module is divided."""
    if degree > 1 and parallel is None:
        raise ConfigError(
            f"strategy.tensor_parallel_size={degree}, but the module is not divided among processes. Divide it in its "
            "configure_model: parallelize_module(self.model, self.device_mesh['tensor_parallel'], plan)."
        )


def check_first_run(module: nn.Module, control: Control) -> None:
    """Raise ConfigError, on all processes, if a run of another trainer has left any of them without some values."""
    if any(control.gather_all(any(isinstance(tensor, Foreign) for tensor in tensors_of(module).values()))):
        raise ConfigError(
            "The module was in a run of another trainer, after which only rank 0 has all of it, and configure_model "
            "cannot divide it among processes again (tensor_parallel_size). Go on with the same trainer, or save a "
            "checkpoint and begin with a new module from it (ckpt_path)."
        )


def check_copies(parallel: TensorParallel | None, copies: Sequence[nn.Module]) -> None:
    """Raise ConfigError for copies of a divided module, such as averages: only the module itself is put together."""
    if parallel is not None and copies:
        raise ConfigError(
            "A callback keeps a copy of the module (averaged weights), which does not go together with tensor "
            "parallelism (tensor_parallel_size), because only the module itself is put together (trainer.callbacks). "
            "Remove it."
        )


def ties_of(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter that has several, by each of its other names."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(p), name)) for name, p in module.named_parameters(remove_duplicate=False)]
    return {name: known for name, known in named if name != known}


def check_ties(before: Mapping[str, str], module: nn.Module) -> None:
    """Raise ConfigError if parameters that were tied are not any more; `before`: see `ties_of`."""
    lost = {name: first for name, first in before.items() if ties_of(module).get(name) != first}
    for name, first in lost.items():
        raise ConfigError(
            f"parallelize_module in configure_model makes two parameters of {first!r} and {name!r}, which were one: "
            "they would be trained apart. Leave both out of its plan, or tie them again after it."
        )
