"""The layout of a run: which rank holds which parameter and buffer; elsewhere they are foreign tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp._compat.lightning_module import set_device
from lightning_gpp.errors import ConfigError
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.runtime.named_tensors import paths_around, replace_tensors, tensor_named, tensors_of, with_values
from lightning_gpp.runtime.sharding.shards import local
from lightning_gpp.runtime.transport import as_sent
from lightning_gpp.training.control import Control
from lightning_gpp.training.tensors.foreign import Foreign, Whereabouts, foreign_like
from lightning_gpp.wording import some


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table of who owns what in a run: parameters and buffers, by canonical name.

    Args:
        plan: the plan of training.
        devices: the devices that use each; the first one is its holder.
        uses: the stages that use each.
        complete: whether rank 0 had all of them before.
    """

    plan: Plan
    devices: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    complete: bool = True

    def names_on(self, device: int) -> set[str]:
        return {name for name, devices in self.devices.items() if device in devices}

    def elsewhere(self, control: Control) -> dict[str, Whereabouts]:
        """The parameters and buffers that only other ranks of a rank's pipeline hold."""
        processes = [control.mesh.processes(rank) for rank in control.mesh.pipeline_ranks()]
        found = {}
        for name in (name for name, devices in self.devices.items() if control.device not in devices):
            stages = ", ".join(self.plan.stages[stage].name for stage in self.uses.get(name, ())) or STEP
            ranks = frozenset(process for device in self.devices[name] for process in processes[device])
            found[name] = Whereabouts(name, stages, ranks)
        return found

    def ranks(self, name: str, control: Control) -> list[int]:
        """The ranks of all pipelines that hold a tensor."""
        pipelines = range(control.num_pipelines)
        return [control.mesh.global_rank(device, p) for p in pipelines for device in self.devices[name]]

    def held_by(self, device: int) -> list[str]:
        return [name for name, devices in self.devices.items() if devices[0] == device]

    def held_first(self, control: Control) -> set[str]:
        """Names of the tensors whose values a checkpoint takes from this device, from some member."""
        return set(self.held_by(control.device)) if control.pipeline == 0 else set()

    def saved_here(self, control: Control) -> set[str]:
        """Names of the tensors whose values a checkpoint takes from this process."""
        return self.held_first(control) if control.member == 0 else set()


def place(module: nn.Module, plan: Plan, used: Sequence[Collection[str]], steps: Sequence[int] = (0,)) -> Layout:
    """The layout of a plan. Tensors that no stage uses are with the user's step.

    Args:
        module: the user's module.
        plan: the plan of the run.
        used: the names that each stage uses.
        steps: the devices that run the user's step.
    """
    names = tensors_of(module)
    uses = {name: tuple(number for number, of_stage in enumerate(used) if name in of_stage) for name in names}
    devices = {name: {device for stage in uses[name] for device in plan.stages[stage].devices} for name in names}
    return Layout(plan=plan, devices={n: tuple(sorted(found or steps)) for n, found in devices.items()}, uses=uses)


def drop(module: nn.Module, elsewhere: Mapping[str, Whereabouts], device: torch.device) -> None:
    """Replace the parameters and buffers of other ranks by foreign tensors, which seem to be on `device`.

    Tied ones stay tied.
    """
    dropped = {name: t for name, t in tensors_of(module).items() if name in elsewhere and not isinstance(t, Foreign)}
    replace_tensors(
        module, [(tensor, foreign_like(tensor, device, [elsewhere[name]])) for name, tensor in dropped.items()]
    )


def materialise(module: nn.Module, names: Iterable[str]) -> None:
    """Allocate CPU memory for those of these tensors that have none. Values are undefined."""
    tensors = tensors_of(module)
    lacking = [tensors[name] for name in names if tensors[name].is_meta]
    empty = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cpu") for each in lacking]
    replace_tensors(module, [(each, with_values(each, values)) for each, values in zip(lacking, empty, strict=True)])


def settle(
    module: nn.Module,
    layout: Layout,
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
    absent = [name for name in layout.devices if not any(name in names for names in present)]
    stored = stored or {}
    read = {name for name in absent if name in stored}
    mine = layout.names_on(control.device)
    _initialise(module, {name for name in absent if name in mine - read and control.pipeline == 0})
    materialise(module, mine)
    for name in sorted(read & mine):
        stored[name](tensor_named(module, name))
    for name in [name for name in layout.devices if name not in read]:
        users = [process for rank in layout.ranks(name, control) for process in control.mesh.processes(rank)]
        owners = [process for process, names in enumerate(present) if name in names] or users[:1]
        source = next((process for process in users if process in owners), owners[0])
        control.pass_on(tensor_named(module, name), source, [process for process in users if process != source])
    drop(module, layout.elsewhere(control), device)
    return not absent and len(present[0]) == len(layout.devices)


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
    inside = {path for name in placed for path in paths_around(name)}
    new = [name for name, _ in module.named_parameters() if name not in placed]
    lacking = {name: None for name in new if not inside.isdisjoint(paths_around(name))}
    lacking.update(dict.fromkeys(sorted(name for name in given if name not in placed)))
    if lacking:
        raise ConfigError(
            f"After training had begun, {type(module).__name__} got parameters that no stage has: "
            f"{some(list(lacking))}. Stages are made once, of the layers that exist then. Make all layers in "
            "__init__ or configure_model; let a flag decide in the forward whether one is called, and freeze it "
            "(requires_grad_(False)) until then. Or end trainer.fit, add the layers, and call it again."
        )
