"""ZeRO stage 1: every parameter has one owner among its replicas, the only one that steps it and keeps state for it.

Parameters are not divided. So any optimizer works, even one that treats a parameter as a matrix; a state dict is per
parameter, as without sharding; and the imbalance is at most one parameter. Gradients are all-reduced, not reduced to
the owner: sums, norms and clipping are bit for bit those of unsharded replicas, and all-reduces overlap with backwards
in the same way. The price is that a step moves 3 (n-1)/n instead of 2 (n-1)/n parameter sizes per replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime import gradients
from lightning_gpp.runtime.gradients import parts
from lightning_gpp.runtime.mesh import Mesh

NUM_IN_FLIGHT: Final = 4
"""Number of simultaneous broadcasts; each has a flat copy of its parameters."""


def assign_owners(parameters: Mapping[str, Tensor], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Choose one holder of every parameter so that owned bytes are balanced: largest first, to the least loaded.

    Parameters that are trained are assigned before the frozen ones. The owner of a parameter must stay the same as long
    as there is optimizer state: assign once.

    Args:
        parameters: parameters of the full model; their values do not matter, and may be on the meta device.
        holders: global ranks that hold each parameter; the same on all ranks.

    Returns:
        Global ranks by name; the same on all ranks.
    """
    load = dict.fromkeys(sorted({rank for ranks in holders.values() for rank in ranks}), 0)
    owners = {}
    for name in sorted(holders, key=lambda n: (not parameters[n].requires_grad, -parameters[n].nbytes, n)):
        owner = min(holders[name], key=lambda rank: (load[rank], rank))
        load[owner] += parameters[name].nbytes
        owners[name] = owner
    return {name: owners[name] for name in holders}


class OwnedParameters:
    """Sends parameters from their owners to the other holders. All ranks construct it together.

    Args:
        parameters: this rank's parameters, by canonical name; those that do not require grad are ignored.
        holders: global ranks that hold each parameter of the model; the same on all ranks.
        owners: one holder of every parameter; the same on all ranks.
        mesh: the mesh of the ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        holders: Mapping[str, Sequence[int]],
        owners: Mapping[str, int],
        mesh: Mesh,
    ) -> None:
        self._parameters, self._owners, self._mesh = dict(parameters), dict(owners), mesh
        self._holders = {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
        self._groups = mesh.groups("owners", (ranks for ranks in self._holders.values() if len(ranks) > 1))

    @property
    def owned(self) -> set[str]:
        """The parameters that this rank's optimizers step, and keep state for."""
        return {name for name in self._parameters if self._owners[name] == self._mesh.rank}

    def publish(self, names: Iterable[str] | None = None, frozen: Collection[str] = ()) -> None:
        """Give all holders the owners' values, and drop the gradients of other parameters, after an optimizer step.

        All holders call it with the same names. The optimizer's `zero_grad` knows only parameters that this rank owns,
        so the other gradients are dropped here.

        Args:
            names: parameters of the optimizer that stepped; None for all.
            frozen: parameters that are no longer trained, and that optimizers may still step, as they have momentum.
        """
        wanted = set(self._parameters if names is None else names)
        flight: deque[_Broadcast] = deque()
        for broadcast in self._broadcasts(wanted, frozen):
            if len(flight) == NUM_IN_FLIGHT:
                flight.popleft().finish()
            flight.append(broadcast)
        for broadcast in flight:
            broadcast.finish()
        for name in wanted & set(self._parameters):
            if self._owners[name] != self._mesh.rank:
                self._parameters[name].grad = None

    def _broadcasts(self, wanted: set[str], frozen: Collection[str]) -> Iterator[_Broadcast]:
        """Broadcasts, started one by one, in the same order on all holders."""
        held = {name: p for name, p in self._parameters.items() if name in wanted}
        trained = {name: p for name, p in held.items() if p.requires_grad or name in frozen}
        place = {name: (self._holders[name], self._owners[name], str(p.dtype)) for name, p in trained.items()}
        for (ranks, owner, _), names in groupby(sorted(place, key=lambda name: (place[name], name)), place.__getitem__):
            if ranks in self._groups:
                named = {name: trained[name] for name in names}
                for part in parts(named, gradients.BUCKET_BYTES):
                    root, mine = ranks.index(owner), owner == self._mesh.rank
                    yield _Broadcast(list(part.values()), root, self._groups[ranks], mine)


class _Broadcast:
    """Parameters of one owner, as one flat tensor."""

    def __init__(self, parameters: Sequence[Parameter], root: int, group: dist.ProcessGroup, mine: bool) -> None:
        self._parameters, self._mine = parameters, mine
        self._flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._work = dist.broadcast(self._flat, group_src=root, group=group, async_op=True)

    def finish(self) -> None:
        self._work.wait()
        if self._mine:
            return
        with torch.no_grad():
            values = torch.split(self._flat, [parameter.numel() for parameter in self._parameters])
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value.view_as(parameter))
