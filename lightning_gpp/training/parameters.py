"""Parameter placement: which rank holds which parameter and buffer; others stay in the module tree as meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.training.control import Control


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that use every parameter and buffer (by canonical name); the first one is its holder."""

    devices: Mapping[str, tuple[int, ...]]

    def names_on(self, device: int) -> set[str]:
        return {name for name, devices in self.devices.items() if device in devices}

    def held_by(self, device: int) -> list[str]:
        return [name for name, devices in self.devices.items() if devices[0] == device]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name: the first one under which a tied tensor is found."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def place(module: nn.Module, plan: Plan, used: Sequence[Iterable[str]]) -> Placement:
    """The parameter placement, from the names that each stage uses. Unused tensors are with the user's step."""
    devices: dict[str, set[int]] = {name: set() for name in tensors_of(module)}
    for stage, names in zip(plan.stages, used, strict=True):
        for name in names:
            devices[name].update(stage.devices)
    return Placement({name: tuple(sorted(found or {0})) for name, found in devices.items()})


def drop(module: nn.Module, keep: set[str]) -> None:
    """Replace all parameters and buffers except `keep` by meta tensors. Tied ones stay tied."""
    foreign = {name: tensor for name, tensor in tensors_of(module).items() if name not in keep and not tensor.is_meta}
    replace_tensors(module, {id(tensor): (tensor, _like(tensor, "meta")) for tensor in foreign.values()})


def replace_tensors(module: nn.Module, swaps: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Replace parameters and buffers by other tensors. `swaps`: id of the old one -> (old, new)."""
    for part in module.modules():
        named = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) in swaps:
                setattr(part, name, swaps[id(tensor)][1])


def _like(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of the same kind on another device, without values."""
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def materialise(module: nn.Module, names: Iterable[str]) -> None:
    """Allocate CPU memory for those of these tensors that have none. Values are undefined."""
    tensors = tensors_of(module)
    empty = [tensors[name] for name in names if tensors[name].is_meta]
    replace_tensors(module, {id(tensor): (tensor, _like(tensor, "cpu")) for tensor in empty})


def settle(module: nn.Module, placement: Placement, control: Control) -> bool:
    """Give every rank the values of the tensors it uses, equal on all ranks that use them; drop the others.

    Values come from the first of a tensor's ranks that has them, or else from the first other rank. Tensors that no
    rank has are initialised by their modules' `reset_parameters`. Returns True if rank 0 had all values.

    Raises:
        ConfigError: a module without `reset_parameters` was built on the meta device.
    """
    present = control.gather({name for name, tensor in tensors_of(module).items() if not tensor.is_meta})
    absent = [name for name in placement.devices if not any(name in names for names in present)]
    mine = placement.names_on(control.device)
    _initialise(module, {name for name in absent if name in mine and control.pipeline == 0})
    materialise(module, mine)
    for name, devices in placement.devices.items():
        users = [control.mesh.global_rank(device, p) for p in range(control.num_pipelines) for device in devices]
        owners = [rank for rank, names in enumerate(present) if name in names] or users[:1]
        source = next((rank for rank in users if rank in owners), owners[0])
        _pass_on(tensors_of_one(module, name), source, [rank for rank in users if rank != source], control)
    drop(module, mine)
    return not absent and len(present[0]) == len(placement.devices)


def equalise(module: nn.Module, control: Control) -> None:
    """Give all ranks the values of rank 0, for all parameters and buffers."""
    for tensor in tensors_of(module).values():
        values = tensor.detach().cpu().contiguous()
        dist.broadcast(values, src=0, group=control.world)
        with torch.no_grad():
            tensor.copy_(values)


def tensors_of_one(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def _pass_on(tensor: Tensor, source: int, receivers: list[int], control: Control) -> None:
    if control.rank == source:
        for rank in receivers:
            dist.send(tensor.detach().cpu().contiguous(), dst=rank, group=control.world)
    elif control.rank in receivers:
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(received, src=source, group=control.world)
        with torch.no_grad():
            tensor.copy_(received)


def _initialise(module: nn.Module, names: set[str]) -> None:
    wanted = {id(tensor) for name, tensor in tensors_of(module).items() if name in names}
    parts = [(path, part) for path, part in module.named_modules() if wanted & {id(t) for t in _direct(part)}]
    for path, part in parts:
        if not callable(getattr(part, "reset_parameters", None)):
            raise ConfigError(
                f"Module {path!r} ({type(part).__name__}) was built on the meta device and has no reset_parameters(), "
                "so it cannot get values. Build it on the CPU, give it that method, or load a checkpoint."
            )
    materialise(module, names)
    for _, part in parts:
        part.reset_parameters()


def _direct(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def move(module: nn.Module, device: torch.device) -> None:
    """Move tensors with memory to a device, one at a time; parameters stay the same objects, and shards do not move."""
    for parameter in module.parameters():
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
    buffers = [buffer for buffer in module.buffers() if not buffer.is_meta and buffer.device != device]
    replace_tensors(module, {id(buffer): (buffer, buffer.to(device)) for buffer in buffers})


def bytes_of(module: nn.Module) -> int:
    """Memory of the parameters and buffers that this rank holds, in bytes."""
    return sum(local(tensor.detach()).nbytes for tensor in tensors_of(module).values() if not tensor.is_meta)
