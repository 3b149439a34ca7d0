"""Parameter placement: which rank holds which parameter and buffer; elsewhere they are foreign tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp._compat.lightning_module import set_device
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.runtime.transport import as_sent
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.foreign import Foreign, Whereabouts, attributes_of, foreign_like
from lightning_gpp.wording import some


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that use every parameter and buffer (by canonical name); the first one is its holder.

    `stages`: the names of the stages that use it, for messages.
    """

    devices: Mapping[str, tuple[int, ...]]
    stages: Mapping[str, str] = field(default_factory=dict)

    def names_on(self, device: int) -> set[str]:
        return {name for name, devices in self.devices.items() if device in devices}

    def elsewhere(self, control: Control) -> dict[str, Whereabouts]:
        """The parameters and buffers that only other ranks of a rank's pipeline hold."""
        processes = [control.mesh.processes(rank) for rank in control.mesh.pipeline_ranks()]
        ranks = {
            name: frozenset(process for device in devices for process in processes[device])
            for name, devices in self.devices.items()
            if control.device not in devices
        }
        return {name: Whereabouts(name, self.stages.get(name, ""), holders) for name, holders in ranks.items()}

    def held_by(self, device: int) -> list[str]:
        return [name for name, devices in self.devices.items() if devices[0] == device]


def saved_here(placement: Placement, control: Control) -> set[str]:
    """Names of the parameters and buffers whose values a checkpoint takes from this process."""
    return held_first(placement, control) if control.member == 0 else set()


def held_first(placement: Placement, control: Control) -> set[str]:
    """Names of the parameters and buffers whose values a checkpoint takes from this device, from some member."""
    return set(placement.held_by(control.device)) if control.pipeline == 0 else set()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name: the first one under which a tied tensor is found."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def place(
    module: nn.Module,
    plan: Plan,
    used: Sequence[Iterable[str]],
    steps: Sequence[int] = (0,),
) -> Placement:
    """The parameter placement. Tensors that no stage uses are with the user's step.

    Args:
        module: the user's module.
        plan: the plan of the run.
        used: the names that each stage uses.
        steps: the devices that run the user's step.
    """
    stages: dict[str, list[Stage]] = {name: [] for name in tensors_of(module)}
    for stage, names in zip(plan.stages, used, strict=True):
        for name in dict.fromkeys(names):
            stages[name].append(stage)
    devices = {name: {device for stage in users for device in stage.devices} for name, users in stages.items()}
    return Placement(
        {name: tuple(sorted(found or steps)) for name, found in devices.items()},
        {name: ", ".join(stage.name for stage in users) or STEP for name, users in stages.items()},
    )


def drop(module: nn.Module, elsewhere: Mapping[str, Whereabouts], device: torch.device) -> None:
    """Replace the parameters and buffers of other ranks by foreign tensors, which seem to be on `device`.

    Tied ones stay tied.
    """
    dropped = {name: t for name, t in tensors_of(module).items() if name in elsewhere and not isinstance(t, Foreign)}
    replace_tensors(
        module, [(tensor, foreign_like(tensor, device, [elsewhere[name]])) for name, tensor in dropped.items()]
    )


Swaps = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a module, each with the one that replaces it."""


def replace_tensors(module: nn.Module, swaps: Swaps) -> None:
    """Replace parameters and buffers by other tensors."""
    known = {id(before): after for before, after in swaps}
    for part in module.modules():
        named = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) in known:
                setattr(part, name, known[id(tensor)])


@contextmanager
def replaced_tensors(module: nn.Module, swaps: Swaps) -> Iterator[None]:
    """Inside, parameters and buffers are replaced by other tensors."""
    replace_tensors(module, swaps)
    try:
        yield
    finally:
        replace_tensors(module, [(after, before) for before, after in swaps])


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """A tensor of the same kind with these values, without hooks."""
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=tensor.requires_grad)
    vars(parameter).update(attributes_of(tensor))
    return parameter


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same kind without memory, which belongs to no rank."""
    return with_values(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def materialise(module: nn.Module, names: Iterable[str]) -> None:
    """Allocate CPU memory for those of these tensors that have none. Values are undefined."""
    tensors = tensors_of(module)
    lacking = [tensors[name] for name in names if tensors[name].is_meta]
    empty = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cpu") for each in lacking]
    replace_tensors(module, [(each, with_values(each, values)) for each, values in zip(lacking, empty, strict=True)])


def settle(
    module: nn.Module,
    placement: Placement,
    control: Control,
    device: torch.device,
    stored: Mapping[str, Callable[[Tensor], None]] | None = None,
) -> bool:
    """Give every rank the values of the tensors it uses, equal on all ranks that use them; the others become
    foreign, on `device`.

    Values come from the first of a tensor's ranks that has them, or else from the first other rank. Tensors that no
    rank has are read by the functions in `stored`, or initialised by their modules' `reset_parameters`.
    Returns True if rank 0 had all values.

    Raises:
        ConfigError: a module without `reset_parameters` was built on the meta device.
    """
    present = control.gather_all({name for name, tensor in tensors_of(module).items() if not tensor.is_meta})
    absent = [name for name in placement.devices if not any(name in names for names in present)]
    stored = stored or {}
    read = {name for name in absent if name in stored}
    mine = placement.names_on(control.device)
    _initialise(module, {name for name in absent if name in mine - read and control.pipeline == 0})
    materialise(module, mine)
    for name in sorted(read & mine):
        stored[name](tensors_of_one(module, name))
    for name, devices in placement.devices.items():
        if name in read:
            continue
        ranks = [control.mesh.global_rank(device, p) for p in range(control.num_pipelines) for device in devices]
        users = [process for rank in ranks for process in control.mesh.processes(rank)]
        owners = [process for process, names in enumerate(present) if name in names] or users[:1]
        source = next((process for process in users if process in owners), owners[0])
        control.pass_on(tensors_of_one(module, name), source, [process for process in users if process != source])
    drop(module, placement.elsewhere(control), device)
    return not absent and len(present[0]) == len(placement.devices)


def equalise(module: nn.Module, control: Control) -> None:
    """Give all processes the values of the first one, for the parameters and buffers that differ between them.

    Nothing happens if one of them lacks some, as after an earlier run.
    """
    tensors = tensors_of(module)
    if not any(control.gather_all(any(tensor.is_meta for tensor in tensors.values()))):
        digests = control.gather_all([digest(tensor) for tensor in tensors.values()])
        for tensor, *found in zip(tensors.values(), *digests, strict=True):
            if len(set(found)) > 1:
                values = tensor.detach().cpu().contiguous()
                dist.broadcast(as_sent(values), group_src=0, group=control.everyone)
                with torch.no_grad():
                    tensor.copy_(values)


def digest(tensor: Tensor) -> tuple[float, ...]:
    """Numbers that differ if values do, except by a rare accident."""
    values = tensor.detach().resolve_conj().flatten()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    exact = values.to(torch.float64) if values.numel() < 1000 else values.to(torch.float32)
    ends = (values[0], values[-1]) if values.numel() else ()
    numbers = (exact.sum(), exact.abs().sum(), *ends)
    return tuple(torch.stack([number.double() for number in numbers]).tolist())  # one wait for the device


def tensors_of_one(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def _initialise(module: nn.Module, names: set[str]) -> None:
    wanted = {id(tensor) for name, tensor in tensors_of(module).items() if name in names}
    parts = [
        (path, part)
        for path, part in module.named_modules()
        if wanted & {id(each) for each in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    ]
    for path, part in parts:
        if not callable(getattr(part, "reset_parameters", None)):
            raise ConfigError(
                f"Module {path!r} ({type(part).__name__}) was built on the meta device and has no reset_parameters(), "
                "so it cannot get values. Build it on the CPU, give it that method, or load a checkpoint."
            )
    materialise(module, names)
    for _, part in parts:
        part.reset_parameters()


def move(module: nn.Module, device: torch.device) -> None:
    """Move tensors with memory to a device, one at a time; parameters stay the same objects, and shards do not move."""
    for parameter in module.parameters():
        if _is_plain(parameter):
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
    buffers = [buffer for buffer in module.buffers() if not buffer.is_meta and buffer.device != device]
    replace_tensors(module, [(buffer, buffer.to(device)) for buffer in buffers])
    flatten(module)
    set_device(module, device)


def flatten(module: nn.Module) -> None:
    """Put the parameters of each recurrent network into one block of memory, as cuDNN wants them.

    Only `module.to(device)` does that by itself. Elsewhere than on CUDA it does nothing.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase) and all(_is_plain(parameter) for parameter in part.parameters()):
            part.flatten_parameters()


def _is_plain(parameter: Tensor) -> bool:
    return not parameter.is_meta and not isinstance(parameter, DTensor)


def bytes_of(module: nn.Module) -> int:
    """Memory of the parameters and buffers that this rank holds, in bytes."""
    return sum(local(tensor.detach()).nbytes for tensor in tensors_of(module).values() if not tensor.is_meta)


def check_grown(module: nn.Module, placed: Collection[str], given: Iterable[str]) -> None:
    """Check that no stage lacks a parameter.

    Copies of modules that hooks make, and that training does not call, need no stage.

    Args:
        module: the user's module.
        placed: names of the parameters that had a place when stages were made.
        given: names of the parameters that optimizers have.

    Raises:
        ConfigError: a module of a stage has got a parameter, or an optimizer has one that has no place.
    """
    inside = {path for name in placed for path in _paths_around(name)}
    new = [name for name, _ in module.named_parameters() if name not in placed]
    lacking = {name: None for name in new if not inside.isdisjoint(_paths_around(name))}
    lacking.update(dict.fromkeys(sorted(name for name in given if name not in placed)))
    if lacking:
        raise ConfigError(
            f"After training had begun, {type(module).__name__} got parameters that no stage has: "
            f"{some(list(lacking))}. Stages are made once, of the layers that exist then. Make all layers in "
            "__init__ or configure_model; let a flag decide in the forward whether one is called, and freeze it "
            "(requires_grad_(False)) until then. Or end trainer.fit, add the layers, and call it again."
        )


def _paths_around(name: str) -> list[str]:
    """The paths of the modules around a parameter, without the module itself."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
