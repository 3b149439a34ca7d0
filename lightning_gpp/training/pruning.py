"""Pruned parameters: torch renames them and multiplies them with masks in hooks, but stages know them by name.

So a module has one of two forms, with the same parameters:

    torch's form    weight_orig, weight_mask, and their product `weight`: for code that prunes, and for checkpoints
    plain form      weight: its values are the product while stages compute, and otherwise, as for optimizers, those of
                    weight_orig. The gradient is multiplied with the mask, which is what torch's product does to it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from lightning_gpp._compat.torch import parameters_of
from lightning_gpp._compat.torch_pruning import pruning_hooks, remove_hook, without_memory
from lightning_gpp.errors import ConfigError
from lightning_gpp.training.control import Control
from lightning_gpp.training.foreign import Foreign, foreign_like
from lightning_gpp.training.parameters import Placement, replace_tensors, with_values

ORIGINAL: Final = "_orig"
MASK: Final = "_mask"
"""The endings that torch gives to the name of a pruned parameter: for the parameter itself, and for its mask."""

CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class Pruned:
    """A pruned parameter whose module is in plain form.

    Args:
        part: the module that the parameter belongs to.
        name: its name there.
        hook: what torch calls in front of each forward.
        mask: the mask.
        product: parameter times mask at the last forward; torch takes the importance of values from it.
    """

    part: nn.Module
    name: str
    hook: BasePruningMethod
    mask: Tensor
    product: Tensor

    @classmethod
    def taken(cls, part: nn.Module, name: str, hook: BasePruningMethod) -> Pruned:
        """Bring a parameter into plain form."""
        parameter, mask, product = (getattr(part, name + suffix) for suffix in (ORIGINAL, MASK, ""))
        for suffix in (ORIGINAL, MASK, ""):
            delattr(part, name + suffix)
        remove_hook(part, hook)
        part.register_parameter(name, parameter)
        return cls(part, name, hook, mask, product.detach())

    def put(self) -> None:
        """Bring the parameter into torch's form."""
        parameter = self.parameter
        delattr(self.part, self.name)
        self.part.register_parameter(self.name + ORIGINAL, parameter)
        self.part.register_buffer(self.name + MASK, self.mask)
        setattr(self.part, self.name, self.product)
        self.part.register_forward_pre_hook(self.hook)

    @property
    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.part, self.name)
        return found

    @torch.no_grad()
    def multiply(self) -> Tensor:
        """The product with the present values, in the way of torch."""
        with torch.inference_mode(False):
            self.product = self.mask.to(self.parameter.dtype) * self.parameter.detach()
        return self.product


class Pruning:
    """Knows the pruned parameters of a module that is divided among ranks. All ranks call its methods together.

    Args:
        module: the module.
        placement: the ranks that hold its parameters.
        control: the side channel of this rank.
        device: the device of this rank.

    Attributes:
        pruned: the pruned parameters while the module is in plain form.
    """

    def __init__(self, module: nn.Module, placement: Placement, control: Control, device: torch.device) -> None:
        self._module, self._placement, self._control, self._device = module, placement, control, device
        self._paths = {part: path for path, part in module.named_modules()}
        self._orders = {part: list(parameters_of(part)) for part in self._paths}
        self.pruned: list[Pruned] = []
        self._shown = True

    # -- the two forms ------------------------------------------------------------------------------------------------

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the module is in torch's form, and may be pruned."""
        with self._in_form(shown=True):
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the module is in plain form."""
        with self._in_form(shown=False):
            yield

    @contextmanager
    def _in_form(self, *, shown: bool) -> Iterator[None]:
        before = self._shown
        (self.show if shown else self.hide)()
        try:
            yield
        finally:
            (self.show if before else self.hide)()

    def show(self) -> None:
        """Bring the module into torch's form, in which it was before training."""
        if not self._shown:
            for pruned in self.pruned:
                pruned.put()
            self.pruned, self._shown = [], True

    def hide(self) -> None:
        """Bring the module into plain form, in which stages can train it."""
        if not self._shown:
            return
        self.pruned, self._shown = [Pruned.taken(*found) for found in list(self._hooks())], False
        for part in {pruned.part for pruned in self.pruned}:
            _sort(part, self._orders[part])
        for pruned in self.pruned:
            self._forget(pruned)

    def multiply(self) -> None:
        """Let the products of a module in torch's form be those of its present values."""
        for part, _, hook in self._hooks():
            hook(part, ())

    def _hooks(self) -> Iterator[tuple[nn.Module, str, BasePruningMethod]]:
        for part in self._paths:
            for name, hook in pruning_hooks(part).items():
                yield part, name, hook

    def _forget(self, pruned: Pruned) -> None:
        """Keep no values of a parameter of other ranks."""
        if isinstance(pruned.parameter, Foreign):
            known = pruned.parameter.origins[0]
            pruned.mask = foreign_like(pruned.mask, self._device, [replace(known, name=known.name + MASK)])
            pruned.product = foreign_like(pruned.product, self._device, [known])
            without_memory(pruned.hook)

    @property
    def placement(self) -> Placement:
        """The placement of the parameters and buffers in the present form."""
        names = {self._path(part, name) for part, name, _ in self._hooks()}
        return Placement(_renamed(self._placement.devices, names), _renamed(self._placement.stages, names))

    def _path(self, part: nn.Module, name: str) -> str:
        return f"{self._paths[part]}.{name}".removeprefix(".")

    # -- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the values of pruned parameters are those with masks: for forwards and backwards."""
        here = [pruned for pruned in self.pruned if not pruned.mask.is_meta]
        before = [pruned.parameter.data for pruned in here]
        for pruned in here:
            pruned.parameter.data = pruned.multiply()
        try:
            yield
        finally:
            for pruned, values in zip(here, before, strict=True):
                pruned.parameter.data = values

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Multiply complete gradients with the masks."""
        for pruned in self.pruned:
            gradient = None if pruned.mask.is_meta else pruned.parameter.grad
            if gradient is not None:
                gradient.mul_(pruned.mask.to(gradient.dtype))

    # -- values of all ranks ------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
        """Inside, the module is in torch's form, and every rank has the values of these parameters and their masks."""
        with self.shown():
            swaps = [self._gather(part, name, suffix) for part, name in parameters for suffix in _suffixes(part, name)]
            try:
                yield
            finally:
                replace_tensors(self._module, {id(new): (new, old) for old, new in swaps})

    def _gather(self, part: nn.Module, name: str, suffix: str) -> tuple[Tensor, Tensor]:
        """Put values where there are none; returns the tensors before and after."""
        tensor, path = getattr(part, name + suffix), self._path(part, name)
        received = self._received(tensor, path, self._holders(path), self._device)
        if received is not tensor:
            setattr(part, name + suffix, received)
        return tensor, received

    @contextmanager
    def agreeing(self, parameters: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
        """Inside, every rank may change these parameters; afterwards all holders have the values of the first one."""
        with self.shown():
            yield
            for part, name in parameters:
                first, *others = self._holders(self._path(part, name))
                self._control.pass_on(getattr(part, name + _suffixes(part, name)[0]), first, others)

    def fill(self, copies: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Give copies of modules the values that they lack on some ranks, from a holder of the original if it has them.

        Raises:
            ConfigError: no rank has them.
        """
        named = [(part, copy, *each) for part, copy in copies for each in copy.named_parameters()]
        known = self._control.gather([not tensor.is_meta for *_, tensor in named])
        for (part, copy, name, tensor), has in zip(named, zip(*known, strict=True), strict=True):
            path, sources = self._path(part, name), [rank for rank, yes in enumerate(has) if yes]
            if not sources:
                raise ConfigError(
                    f"The values of {path!r} before training are to be kept for pruning (use_lottery_ticket_hypothesis)"
                    ", but it was built without memory. Build the module on the CPU, or do not put them back."
                )
            replace_tensors(copy, {id(tensor): (tensor, self._received(tensor, path, sources, CPU))})

    def _received(self, tensor: Tensor, path: str, sources: Sequence[int], device: torch.device) -> Tensor:
        """A tensor with values, which the ranks in `sources` have."""
        source = next((rank for rank in self._holders(path) if rank in sources), sources[0])
        empty = partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=device)
        received = with_values(tensor, empty()) if tensor.is_meta else tensor
        others = [rank for rank in range(self._control.world_size) if rank not in sources]
        self._control.pass_on(received, source, others)
        return received

    def _holders(self, path: str) -> Sequence[int]:
        mesh, devices = self._control.mesh, self._placement.devices[path]
        return [mesh.global_rank(device, p) for p in range(self._control.num_pipelines) for device in devices]


def _renamed(known: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Facts by name, where the parameters with these names have those of torch's form."""
    suffixes = {name: (ORIGINAL, MASK) if name in names else ("",) for name in known}
    return {name + suffix: value for name, value in known.items() for suffix in suffixes[name]}


def _suffixes(part: nn.Module, name: str) -> list[str]:
    """The endings of the attributes that belong to a parameter, its own first."""
    return [suffix for suffix in (ORIGINAL, MASK, "") if hasattr(part, name + suffix)]


def _sort(part: nn.Module, names: Sequence[str]) -> None:
    """Bring a module's parameters into an order: the last one is that of which torch changed the name."""
    parameters = parameters_of(part)
    found = {name: parameters[name] for name in (*names, *parameters) if name in parameters}
    parameters.clear()
    parameters.update(found)
