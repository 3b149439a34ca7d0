"""Lending: ranks have the values of parameters and buffers of other ranks for a while.

Hooks at the ends of epochs call the network (samples of a generator, a generated text), and so do evaluation steps that
cannot be divided. Hooks run on every rank, perhaps each in its own way (`if trainer.is_global_zero`). So ranks meet
whenever one of them calls a module whose values are elsewhere, and when they have come to the end of the hook:

    rank 0    self.generator(z)  -> meet, compute            end -> meet
    rank 1    end                -> meet, send the values           meet, go on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.stages.answers import Answers
from lightning_gpp.training.control import Control
from lightning_gpp.training.copies import SMALL
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.parameters import Placement, replace_tensors, tensors_of, with_values
from lightning_gpp.training.recipes import lender
from lightning_gpp.training.replicas import Layout


def lending_of(job: Job, layout: Layout) -> Lending | None:
    """Make what lends values in a run; None if ranks have parts of parameters, or do not run hooks at the same time."""
    control, options = job.control, job.options
    divided = control.mesh.most_members > 1 or layout.plan.sharding == "fsdp" or options.weights != SYNCHRONOUS
    if divided or control.num_devices == 1:
        return None
    return Lending(job.module, layout.placement, control, job.device)


class Lending:
    """Lends values between the ranks of a pipeline, which call its methods together.

    Args:
        module: the user's module.
        placement: the parameter placement.
        control: the side channel of this rank.
        device: the device of this rank.
    """

    def __init__(self, module: nn.Module, placement: Placement, control: Control, device: torch.device) -> None:
        self._module, self._control, self._device = module, control, device
        every = set(range(control.num_devices))
        self._holders = {name: ranks for name, ranks in placement.devices.items() if not every <= set(ranks)}
        self._paths = dict(self._divided())
        self._answers = Answers([module.get_submodule(path) for path in self._paths.values()], self._call)
        self._borrowed: list[tuple[Tensor, Tensor]] = []
        self._active = False

    def _divided(self) -> Iterator[tuple[int, str]]:
        """Ids and paths of the modules with values that some ranks lack."""
        for path, part in self._module.named_modules():
            if not self._holders.keys().isdisjoint(self._names_in(path)):
                yield id(part), path

    def _names_in(self, path: str) -> list[str]:
        part = self._module.get_submodule(path)
        inside = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
        return [name for name, tensor in tensors_of(self._module).items() if id(tensor) in inside]

    @contextmanager
    def in_hook(self, named: Set[str] = frozenset(), *, shared: bool = False) -> Iterator[None]:
        """Inside, all ranks run a hook, in which each may call modules whose values are elsewhere, or read values.

        A hook that is called in another one belongs to that.

        Args:
            named: names in the hook's code; small buffers with such names are lent from the beginning, as hooks read
                them outside of modules (the noise levels of a diffusion). So are all single numbers, by which hooks
                decide, and which they count on: ranks that have them would do so before others have read them.
            shared: whether an error of one rank alone may be left out; then ranks meet after an error, too.
        """
        if self._active:
            yield
            return
        small = {name: buffer for name, buffer in self._module.named_buffers() if buffer.nbytes <= SMALL}
        lent = (name for name, buffer in small.items() if buffer.numel() == 1 or name.rpartition(".")[2] in named)
        self._lend(sorted(lent), keep=True)
        token, self._active = lender.set(partial(self._value)), True  # another one in each hook
        try:
            with self._answers.given():
                yield
        except Exception:
            if shared:
                self._lend_others()
            raise
        else:
            self._lend_others()
        finally:
            lender.reset(token)
            self._active = False
            self._give_back()

    def meet(self) -> None:
        """Inside of a hook, lend what other ranks want until all have come here, to do something together."""
        if self._active:
            self._lend_others()

    def _lend_others(self) -> None:
        """Lend what other ranks want until none wants more."""
        while any(names is not None for names in self._meet(None)):
            pass

    @contextmanager
    def to_first(self) -> Iterator[None]:
        """Inside, the rank of the user's step has all values."""
        self._lend(self._names_in(""), keep=self._control.runs_step)
        try:
            yield
        finally:
            self._give_back()

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[id(module)]
        with self._answers.suspended():
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                self._meet(self._names_in(path))
            return module(*args, **kwargs)

    def _value(self, lacking: Tensor) -> Tensor | None:
        """The values of a parameter or buffer that is elsewhere; None for one of a copy, or what is none."""
        name = next((name for name, tensor in tensors_of(self._module).items() if tensor is lacking), None)
        if name is not None:
            self._meet([name])
        return next((values for before, values in self._borrowed if before is lacking), None)

    def _meet(self, wanted: Sequence[str] | None) -> list[Sequence[str] | None]:
        """Lend the values that ranks want, by name; None is a rank that wants no more."""
        requests: list[Sequence[str] | None] = self._control.gather_in_pipeline(wanted)
        for names in sorted({tuple(names) for names in requests if names is not None}):
            self._lend(names, keep=names == tuple(wanted or ()))
        return requests

    def _lend(self, names: Iterable[str], *, keep: bool) -> None:
        swaps: dict[int, tuple[Tensor, Tensor]] = {}
        tensors = tensors_of(self._module)
        for name in names:
            if name in self._holders:
                lacking, values = tensors[name], self._broadcast(tensors[name], self._holders[name][0])
                if keep and lacking.is_meta:
                    swaps[id(lacking)] = lacking, with_values(lacking, values)
        replace_tensors(self._module, swaps)
        self._borrowed += swaps.values()

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The values of a tensor on all ranks; `source` is the device that sends them."""
        if self._control.device == source:
            values = tensor.detach().contiguous()
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        mesh = self._control.mesh
        group = mesh.pipeline_control_group if values.device.type == "cpu" else mesh.pipeline_group
        dist.broadcast(values, group_src=source, group=group)
        return values

    def _give_back(self) -> None:
        replace_tensors(self._module, {id(values): (values, lacking) for lacking, values in self._borrowed})
        self._borrowed = []
