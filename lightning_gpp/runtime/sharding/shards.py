"""The sharded parameters of one stage: torch's `fully_shard`, driven by explicit calls.

`fully_shard` expects a module whose forward computes with the sharded parameters, and gathers and reduces from hooks of
that forward and its backward. A stage of a pipeline has no such forward: many micro-batches are in flight, a backward
starts from tensors of other devices, and the schedule decides when to unshard and to reduce. So the module that is
sharded here only owns the parameters, and its forward is the identity:

    unshard  module.unshard()           a public call of FSDP; the user's modules get the unsharded parameters
    work     plain autograd             gradients accumulate in the unsharded parameters, micro-batch by micro-batch
    reduce   module(cue).backward()     the end of this backward makes FSDP reduce-scatter the accumulated gradients
    reshard  module.reshard()           the user's modules get the shards, as DTensors

FSDP leaves no hook and no class in the user's modules. It does not matter who computes the gradients, and in how many
parts: a replica without samples can take part, and so can a split backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

ShardPlace = tuple[nn.Module, str]
"""A module of the user and the attribute under which it has a parameter."""


def places_of(module: nn.Module) -> dict[int, list[ShardPlace]]:
    """All places of the module tree where a parameter is registered, by its id; a tied one has several."""
    places: dict[int, list[ShardPlace]] = {}
    for part in module.modules():
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((part, attribute))
    return places


class _Owner(nn.Module):
    """Owns the parameters of one dtype, by number; see the top of this file."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def forward(self, cue: Tensor) -> Tensor:
        return cue * 1


def _sharded(parameters: Sequence[Parameter], mesh: DeviceMesh) -> FSDPModule:
    owner = fully_shard(_Owner(parameters), mesh=mesh, reshard_after_forward=False)
    owner.set_gradient_divide_factor(1.0)  # gradients of this library are sums
    owner.set_force_sum_reduction_for_comms(True)  # gloo can only sum
    owner.set_reduce_scatter_unused_params(True)  # replicas may use different parameters
    owner.set_reshard_after_backward(False)
    owner.set_modules_to_backward_prefetch([owner])  # itself, which is unsharded already: no other stage's
    return owner


class StageShards:
    """The parameters of one stage: unsharded between `ready` and `reshard`, otherwise 1/n of them.

    All replicas construct it together, with the same values.

    Args:
        parameters: the stage's parameters, by name.
        places: their places in the user's modules, see `places_of`.
        mesh: the stage's replicas, one axis.
        flags_group: the same ranks, for tensors on the CPU.

    Attributes:
        shards: DTensors, which the user's modules have between `reshard` and `ready`.
        stepped: the same memory as plain tensors, gradients included: optimizers group parameters in one call, which
            DTensors of different replicas, or next to plain tensors, refuse.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        places: Mapping[int, Sequence[ShardPlace]],
        mesh: DeviceMesh,
        flags_group: dist.ProcessGroup,
    ) -> None:
        self.names = sorted(parameters, key=lambda name: str(parameters[name].dtype))  # stable: sorted by dtype only
        whole = [parameters[name] for name in self.names]
        self._places = [places[id(parameter)] for parameter in whole]
        dtypes = dict.fromkeys(parameter.dtype for parameter in whole)
        self.owners = [_sharded([p for p in whole if p.dtype == dtype], mesh) for dtype in dtypes]
        self._flags_group = flags_group
        self._handles: list[UnshardHandle] | None = None
        self._flags: _Flags | None = None
        self.whole = False
        self.shards = self._current()
        self._gathered: list[Parameter] = []
        self.stepped = [Parameter(local(shard.detach()), shard.requires_grad) for shard in self.shards]
        self._handed = False
        _alike(whole, self.shards)
        _alike(whole, self.stepped)
        self._show(self.shards)

    def prepare(self) -> None:
        """Let FSDP initialise, and make the unsharded parameters. All replicas call it, before anything else.

        The unsharded parameters remain the same objects. A validation in inference mode must not make them.
        """
        with torch.no_grad():
            for owner in self.owners:
                _cue(owner, self.shards[0].device)
        self._gathered = self._current()
        _alike(self.shards, self._gathered)
        self.whole = True
        self.reshard()

    def unshard(self) -> None:
        """Start to unshard."""
        if not self.whole and self._handles is None:
            handles = [owner.unshard(async_op=True) for owner in self.owners]
            self._handles = [handle for handle in handles if handle is not None]

    def ready(self) -> None:
        """Wait for `unshard`, calling it if necessary, and put the unsharded parameters into the user's modules."""
        if self.whole:
            return
        self.unshard()
        for handle in self._handles or ():
            handle.wait()
        self._handles, self.whole = None, True
        self._show(self._gathered)

    def reshard(self) -> None:
        """Free the other replicas' shards, and put this one's into the user's modules."""
        if self._handles is not None:
            self.ready()
        if self.whole:
            for owner in self.owners:
                owner.reshard()
            self.whole = False
            self._show(self.shards)

    def reduce(self, last: bool) -> None:
        """Reduce-scatter the accumulated gradients, and add the result to the gradients of the shards.

        Args:
            last: whether to wait for this and for all stages before it. On a CPU every call waits.
        """
        was_whole = self.whole
        self.ready()
        before = self._flags.merged() if self._flags is not None else [shard.grad is not None for shard in self.shards]
        self._flags = _Flags([p.grad is not None for p in self._gathered], before, self._flags_group)
        for number, owner in enumerate(self.owners, 1):
            owner.set_is_last_backward(last and number == len(self.owners))
            with torch.enable_grad():
                _cue(owner, self.shards[0].device).backward()
        if not was_whole:
            self.reshard()

    def begin(self) -> None:
        """Begin a mini-batch: drop gradients that the optimizer has set to None."""
        if self._handed:
            for shard, stepped in zip(self.shards, self.stepped, strict=True):
                if stepped.grad is None:
                    shard.grad = None
            self._handed = False

    def finish(self) -> None:
        """Give the gradients to the optimizer: None, not zero, for a parameter without one on any replica."""
        if self._flags is not None:
            for shard, found in zip(self.shards, self._flags.merged(), strict=True):
                if not found:
                    shard.grad = None
            self._flags = None
        for shard, stepped in zip(self.shards, self.stepped, strict=True):
            stepped.grad = None if shard.grad is None else local(shard.grad)
        self._handed = True

    def restore(self) -> None:
        """Put plain unsharded parameters into the user's modules for good. All replicas call it."""
        self.ready()
        plain = [Parameter(gathered.detach().clone(), gathered.requires_grad) for gathered in self._gathered]
        _alike(self._gathered, plain)
        self.reshard()
        self._show(plain)

    def _current(self) -> list[Parameter]:
        return [parameter for owner in self.owners for parameter in _module(owner).parameters()]

    def _show(self, parameters: Sequence[Parameter]) -> None:
        """Put parameters into the user's modules, with the attributes, such as frozen, of those before."""
        for parameter, places in zip(parameters, self._places, strict=True):
            part, attribute = places[0]
            trained = getattr(part, attribute).requires_grad
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
            for part, attribute in places:
                setattr(part, attribute, parameter)


def _module(owner: FSDPModule) -> nn.Module:
    assert isinstance(owner, nn.Module)  # FSDPModule is mixed into a module's class
    return owner


def _cue(owner: FSDPModule, device: torch.device) -> Tensor:
    output: Tensor = _module(owner)(torch.zeros((), device=device, requires_grad=True))
    return output


def _alike(before: Sequence[Parameter], after: Sequence[Parameter]) -> None:
    """Copy attributes that the user has set on parameters."""
    for old, new in zip(before, after, strict=True):
        vars(new).update(vars(old))


class _Flags:
    """Flags of parameters: any replica has a gradient, now or `before`; exchanged while the device computes."""

    def __init__(self, present: Sequence[bool], before: Sequence[bool], group: dist.ProcessGroup) -> None:
        self._before = before
        self._tensor = torch.tensor(present, dtype=torch.uint8)
        self._work: dist.Work = dist.all_reduce(self._tensor, dist.ReduceOp.MAX, group=group, async_op=True)

    def merged(self) -> list[bool]:
        self._work.wait()
        return [bool(flag) or known for flag, known in zip(self._tensor.tolist(), self._before, strict=True)]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
