"""Fully sharded data parallelism (ZeRO stage 3) of the stages of one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import share_comm_ctx
from torch.nn import Parameter

from lightning_gpp.plan import shared_parameter
from lightning_gpp.runtime.gradients import GradientSync, norm_over_ranks
from lightning_gpp.runtime.mesh import CONTROL_BACKEND, Mesh
from lightning_gpp.runtime.sharding.shards import StageShards, local, places_of


class ShardedStages:
    """The `StageSync` of replicas that each keep 1/n of their stage's parameters, gradients and optimizer state.

    Between `reshard` and `ready` the user's modules have DTensors, sharded on dimension 0, in place of their
    parameters. The optimizer steps `stepped`, which are plain tensors with the same memory. Replicas take part in
    `reduce` even without a gradient. Parameters without dimensions, and those that no stage uses, are not sharded, and
    `sync` sums their gradients. Buffers are neither sharded nor summed.

    All ranks construct it together, when replicas have the same values and optimizers have no state yet.

    Args:
        module: the user's module; parameters of other ranks may be on the meta device.
        parameters: this rank's parameters, by canonical name.
        holders: global ranks that hold each parameter of the model; the same on all ranks.
        mesh: the mesh of the ranks.
        stages: stages that use each parameter; the same on all ranks. Frozen parameters are sharded, too.
        device: the device of this rank, which may have no parameters; by default the CPU.

    Attributes:
        reduces: true; shards are always reduced.
        last: whether an optimizer step follows this mini-batch. Shards are reduced after every mini-batch; otherwise
            every replica would have to keep the unsharded gradients of all its stages.

    Raises:
        PlanError: a parameter is used by several stages.
    """

    reduces = True

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Parameter],
        holders: Mapping[str, Sequence[int]],
        mesh: Mesh,
        *,
        stages: Mapping[str, Sequence[int]],
        device: torch.device | None = None,
    ) -> None:
        _check_not_shared(holders, stages)
        self._mesh = mesh
        known = dict(module.named_parameters())
        cut = [n for n in holders if len(holders[n]) > 1 and len(stages.get(n, ())) == 1 and _can_be_cut(known[n])]
        self._cut, self._uses = set(cut), stages
        self._device = device or torch.device("cpu")
        self._counts = set(holders)
        self._frozen_since: Collection[str] = ()
        self._whole = self._summed(parameters, holders)
        ranks_of = {name: tuple(sorted(holders[name])) for name in cut}
        self._stages = dict(self._sharded(module, parameters, ranks_of, stages))
        # One queue of reductions, so that waiting for the last one is waiting for all.
        share_comm_ctx([owner for shards in self._stages.values() for owner in shards.owners])
        for shards in self._stages.values():
            shards.prepare()
        self._reduced: set[int] = set()
        self.gathers = True

    @property
    def last(self) -> bool:
        return self._whole.last

    @last.setter
    def last(self, last: bool) -> None:
        self._whole.last = last
        self._reduced.clear()
        for shards in self._stages.values():
            shards.begin()

    def refresh(
        self,
        parameters: Mapping[str, Parameter],
        holders: Mapping[str, Sequence[int]],
        frozen_since: Collection[str] = (),
    ) -> None:
        """Update the unsharded parameters that count in the norm.

        Called after parameters were frozen, unfrozen or given to an optimizer.

        Args:
            parameters: this rank's parameters, by canonical name.
            holders: as at construction; the same on all ranks.
            frozen_since: see `GradientSync`.
        """
        last = self._whole.last
        self._counts, self._frozen_since = set(holders), frozen_since
        self._whole = self._summed(parameters, holders)
        self._whole.last = last

    def _summed(self, parameters: Mapping[str, Parameter], holders: Mapping[str, Sequence[int]]) -> GradientSync:
        rest = {name: ranks for name, ranks in holders.items() if name not in self._cut}
        mine = {name: parameter for name, parameter in parameters.items() if name in rest}
        since = [name for name in self._frozen_since if name in rest]
        return GradientSync(mine, rest, self._mesh, stages=self._uses, frozen_since=since, device=self._device)

    @property
    def sharded(self) -> set[str]:
        """Names of this rank's sharded parameters."""
        return {name for shards in self._stages.values() for name in shards.names}

    @property
    def stepped(self) -> dict[str, Parameter]:
        """This rank's shards by name, which an optimizer steps instead of the parameters."""
        every = self._stages.values()
        return {name: part for shards in every for name, part in zip(shards.names, shards.stepped, strict=True)}

    def unshard(self, stage: int) -> None:
        """Start to unshard the stage's parameters."""
        if stage in self._stages:
            self._stages[stage].unshard()

    def ready(self, stage: int) -> None:
        """Wait until the stage's parameters are unsharded."""
        if stage in self._stages:
            self._stages[stage].ready()

    def reshard(self, stage: int) -> None:
        """Free the other replicas' shards of the stage's parameters; gradients that were not reduced stay."""
        if stage in self._stages:
            self._stages[stage].reshard()

    def arm(self, stage: int) -> None:
        """Let all-reduces of unsharded parameters start in the next backward; shards are only reduced by `reduce`."""
        self._whole.arm(stage)

    def reduce(self, stage: int) -> None:
        """Reduce-scatter the stage's gradients, and add them to those of earlier mini-batches."""
        self._whole.reduce(stage)
        if stage not in self._stages:
            return
        self._reduced.add(stage)
        self._stages[stage].reduce(last=len(self._reduced) == len(self._stages))

    def sync(self) -> None:
        """Wait until the gradients of shards, and of unsharded parameters, are sums over the replicas."""
        for stage in sorted(self._stages.keys() - self._reduced, reverse=True):
            self.reduce(stage)
        for shards in self._stages.values():
            shards.finish()
        self._reduced.clear()
        self._whole.sync()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the full model's gradient. All ranks of all pipelines call this."""
        return norm_over_ranks(self._counted(), norm_type, self._device, None)

    def restore(self) -> None:
        """Give the user's modules unsharded parameters for good, one stage after the other. All ranks call it."""
        for stage in sorted(self._stages):
            self._stages[stage].restore()

    def _counted(self) -> Iterator[Tensor]:
        yield from self._whole.counted_on(set(range(self._mesh.world_size)))
        for shards in self._stages.values():
            named = zip(shards.names, shards.shards, strict=True)
            yield from (local(p.grad) for name, p in named if name in self._counts and p.grad is not None)

    def _sharded(
        self,
        module: nn.Module,
        parameters: Mapping[str, Parameter],
        cut: Mapping[str, tuple[int, ...]],
        stages: Mapping[str, Sequence[int]],
    ) -> Iterator[tuple[int, StageShards]]:
        groups = self._mesh.groups("shards", cut.values())
        same = self._mesh.backend == CONTROL_BACKEND
        flags = groups if same else self._mesh.groups("shards", cut.values(), CONTROL_BACKEND)
        meshes = {
            ranks: DeviceMesh.from_group(group, self._device.type, mesh_dim_names=("replica",))
            for ranks, group in groups.items()
        }
        places = places_of(module)
        here = {name: stages[name][0] for name in cut if name in parameters}
        for stage in sorted(set(here.values())):
            named = {name: parameters[name] for name in here if here[name] == stage}
            ranks = cut[next(iter(named))]
            yield stage, StageShards(named, places, meshes[ranks], flags[ranks])


def _can_be_cut(parameter: Tensor) -> bool:
    return parameter.dim() > 0 and parameter.numel() > 0


def _check_not_shared(holders: Mapping[str, Sequence[int]], stages: Mapping[str, Sequence[int]]) -> None:
    for name in holders:
        used = stages.get(name, ())
        if len(used) > 1:
            raise shared_parameter(name, [str(stage) for stage in sorted(used)])
