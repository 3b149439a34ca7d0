"""Lending: ranks have the values of parameters and buffers of other ranks for a while.

Hooks at the ends of epochs call the network (samples of a generator, a generated text), and so do evaluation steps that
cannot be divided. Hooks run on every rank, perhaps each in its own way (`if trainer.is_global_zero`). So ranks meet
whenever one of them calls a module whose values are elsewhere, and when they have come to the end of the hook:

    rank 0    self.generator(z)  -> meet, compute            end -> meet
    rank 1    end                -> meet, send the values           meet, go on

A rank that changes a tensor in place may be ahead of others, which have not read it yet. So it meets them first, and
goes on when none of them wants to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_gpp.stages.answers import Answers
from lightning_gpp.training.control import Control
from lightning_gpp.training.copies import SMALL
from lightning_gpp.training.foreign import Foreign, with_lent_values
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.parameters import Placement, replace_tensors, tensors_of, with_values
from lightning_gpp.training.recipes import Lender, lender
from lightning_gpp.training.replicas import Layout

_SETS: Final = frozenset({"__set__", "__setitem__"})
_KEEP: Final = frozenset({"__index__", "__int__", "__invert__", "__iter__"})


class _ChangesInPlace(TorchFunctionMode):
    """Calls `before` in front of a change of a tensor in place, if anything was computed since the last one.

    Args:
        before: called then.
        counts: whether the change of a tensor counts.
        moved: called after a tensor got other data.
    """

    def __init__(self, before: Callable[[], None], counts: Callable[[Tensor], bool], moved: Callable[[], None]) -> None:
        super().__init__()
        self._before, self._counts, self._moved = before, counts, moved
        self.computed, self.paused = True, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "" if self.paused else getattr(func, "__name__", "")
        if name == "__set__":
            return self._set(func, *args)
        if name:
            self._note(name, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _set(self, setter: Callable[[Tensor, Any], None], tensor: Tensor, value: Any) -> None:
        """Set the data of a tensor; flags and gradients are not lent."""
        if setter.__self__ is Tensor.data:  # type: ignore[attr-defined]
            self._note("__set__", (tensor, value))
            setter(tensor, with_lent_values(value))
            self._moved()
        else:
            setter(tensor, value)

    def _note(self, name: str, operands: Sequence[Any]) -> None:
        if not _changes(name):
            self.computed = self.computed or name != "__get__"
        elif any(isinstance(each, Tensor) and self._counts(each) for each in _each(operands[0])):
            if self.computed:
                self._before()
            self.computed = any(isinstance(each, Tensor) for operand in operands[1:] for each in _each(operand))


def _each(operand: Any) -> Sequence[Any]:
    return operand if isinstance(operand, list | tuple) else (operand,)


def _changes(name: str) -> bool:
    """True for the name of a function that changes its first argument."""
    if name.startswith("__"):
        return name in _SETS or (name.startswith("__i") and name not in _KEEP)
    return name.endswith("_")


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
        self._changes = _ChangesInPlace(self._before_change, self._is_divided, self._note_memory)
        self._memory = frozenset[int]()

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
    def in_hook(self, named: Set[str] = frozenset()) -> Iterator[None]:
        """Inside, all ranks run a hook, in which each may call modules whose values are elsewhere, or read values.

        A hook that is called in another one belongs to that.

        Args:
            named: names in the hook's code; small buffers with such names are lent from the beginning, as hooks read
                them outside of modules (the noise levels of a diffusion). So are all single numbers, by which hooks
                decide, and which they count on: ranks that have them would do so before others have read them.
        """
        if self._active:
            yield
            return
        small = {name: buffer for name, buffer in self._module.named_buffers() if buffer.nbytes <= SMALL}
        lent = (name for name, buffer in small.items() if buffer.numel() == 1 or name.rpartition(".")[2] in named)
        self._lend(sorted(lent), keep=True)
        token, self._active = lender.set(Lender(self._value)), True  # another one in each hook
        self._changes.computed = True
        self._note_memory()
        try:
            with self._answers.given(), self._changes:
                yield
            self._lend_others()
        finally:
            lender.reset(token)
            self._active = False
            self._give_back()

    def meet(self) -> None:
        """Inside of a hook, lend what other ranks want until all have come here, to do something together."""
        if self._active:
            self._lend_others()

    def _before_change(self) -> None:
        """Lend what other ranks want before this one changes a tensor."""
        while any(self._meet(())):
            pass

    def _is_divided(self, tensor: Tensor) -> bool:
        """True for a parameter or buffer that some ranks lack, for what was lent of it, and for views."""
        if isinstance(tensor, Foreign):
            return tensor.recipe is None or tensor.recipe.hook is None
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._memory

    def _note_memory(self) -> None:
        tensors = (tensor for name, tensor in tensors_of(self._module).items() if name in self._holders)
        self._memory = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_meta)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        before, self._changes.paused = self._changes.paused, True
        try:
            yield
        finally:
            self._changes.paused = before

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
        self._changes.computed = True
        with self._answers.suspended(), self._unwatched():
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
        with self._unwatched():
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
        self._memory |= {values.untyped_storage().data_ptr() for _, values in swaps.values()}

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
