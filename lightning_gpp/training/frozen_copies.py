"""Frozen copies of modules that training does not call: averages of weights, which hooks update and validation calls.

They are placed where their originals are, so that a hook on every rank has both:

    self.average = copy.deepcopy(self.net).requires_grad_(False)
    ...
    for mean, weight in zip(self.average.parameters(), self.net.parameters()):
        mean.lerp_(weight, 0.01)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Set
from itertools import cycle

from torch import Tensor, nn


def originals(module: nn.Module, used: Set[str]) -> dict[str, str]:
    """The tensor that each one of a frozen copy is a copy of, by name.

    A copy is of the same class and has tensors of the same names and shapes. Where several modules are alike, copies
    belong to them in order, if there are as many, or a multiple.

    Args:
        module: the user's module.
        used: the names of the parameters and buffers that training uses.
    """
    names = {id(tensor): name for name, tensor in _tensors(module)}
    parts = [(path, part, {names[id(tensor)] for _, tensor in _tensors(part)}) for path, part in module.named_modules()]
    called, copies = defaultdict[Hashable, list[nn.Module]](list), defaultdict[Hashable, list[nn.Module]](list)
    paths = list[str]()
    for _, part, held in parts:
        if held & used:
            called[_form(part)].append(part)
    for path, part, held in parts:
        inside = any(path.startswith(f"{around}.") for around in paths)
        if held and not held & used and not inside and _is_frozen(part) and _form(part) in called:
            paths.append(path)
            copies[_form(part)].append(part)
    return {
        names[id(copy)]: names[id(original)]
        for form, found in copies.items()
        if len(found) % len(called[form]) == 0
        for pair in zip(found, cycle(called[form]), strict=False)
        for (_, copy), (_, original) in zip(*map(_tensors, pair), strict=True)
    }


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


def _form(part: nn.Module) -> Hashable:
    return type(part), tuple((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(part))


def _is_frozen(part: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in part.parameters())
