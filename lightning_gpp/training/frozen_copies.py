"""Copies of modules that are not trained: averages of weights, which hooks update (momentum encoders, target networks).

They are placed where their originals are, so that a hook on every rank has both:

    self.average = copy.deepcopy(self.net).requires_grad_(False)
    ...
    for mean, weight in zip(self.average.parameters(), self.net.parameters()):
        mean.lerp_(weight, 0.01)

A copy that the training step calls, too, is planned together with its original if a hook mentions both. Others, such as
the teacher of a distillation, are branches of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from itertools import cycle

import networkx as nx
from torch import nn

from lightning_gpp._compat.lightning_module import trainer_of
from lightning_gpp.capture.calls import tied
from lightning_gpp.capture.isolate import names_of
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.hook_code import names_in_hooks

NamedPart = tuple[str, nn.Module]
"""A module with its path."""


def originals(module: nn.Module, used: Set[str]) -> dict[str, str]:
    """The tensor that each one of a copy, which training does not use, is a copy of, by name.

    Modules that are alike and may learn are layers that begin later, unless a hook mentions both of them.

    Args:
        module: the user's module.
        used: the names of the parameters and buffers that training uses.
    """
    names = {id(tensor): name for tensor, name in names_of(module)}
    trained = used & {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {
        names[id(copy)]: names[id(original)]
        for (_, copied), (_, known) in _not_to_learn(module, [*_pairs(module, used, trained)])
        for (copy, _), (original, _) in zip(names_of(copied), names_of(known), strict=True)
    }


def _not_to_learn(
    module: nn.Module, pairs: Sequence[tuple[NamedPart, NamedPart]]
) -> Iterator[tuple[NamedPart, NamedPart]]:
    """Those pairs of copy and original in which the copy gets no gradients, or a hook mentions both."""
    hooks = _names_in_hooks(module) if pairs else []
    for (copy, part), (original, known) in pairs:
        learns = any(parameter.requires_grad for parameter in part.parameters())
        if not learns or _are_mentioned(hooks, copy, original):
            yield (copy, part), (original, known)


def _are_mentioned(hooks: Sequence[Set[str]], copy: str, original: str) -> bool:
    """True if a hook mentions both modules."""
    return any(_mentions(names, copy, original) and _mentions(names, original, copy) for names in hooks)


def counters(module: nn.Module, copied: Mapping[str, str]) -> set[str]:
    """The buffers of one number that modules around copies have themselves, such as the updates of an average so far.

    Args:
        module: the user's module.
        copied: the tensors of copies, each with its original.
    """
    around = {path: part for path, part in module.named_modules() if _inside(path, copied)}
    return {
        f"{path}.{name}"
        for path, part in around.items()
        if not _inside(path, copied.values())
        for name, buffer in part.named_buffers(recurse=False)
        if buffer.numel() == 1 and f"{path}.{name}" not in copied
    }


def _inside(path: str, names: Iterable[str]) -> bool:
    return any(name.startswith(f"{path}.") for name in names)


def kept_with_originals(graph: OperatorGraph, module: nn.Module, learning: Set[str] = frozenset({""})) -> OperatorGraph:
    """The graph with the operators of copies that hooks update tied to those of their originals.

    A copy gets no gradient from the step. One that computes from results of its original, or the reverse, is left
    alone: it is a layer like others.

    Args:
        graph: the captured step.
        module: the user's module; hooks of its trainer's callbacks count, too.
        learning: the paths of modules that the step calls for gradients; by default the root, for all.
    """
    differentiated = {
        name
        for operator in graph
        for name in operator.parameters
        if any(spec.requires_grad for spec in operator.outputs)
    }
    inside = tuple(f"{path}." if path else "" for path in learning)
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    trained = {name for name in differentiated & names if name.startswith(inside)}
    pairs = [*_pairs(module, trained, trained)]
    hooks = _names_in_hooks(module) if pairs else []
    groups = [
        frozenset(f"{path}.{name}" for path in (copy, original))
        for (copy, part), (original, _) in pairs
        if _are_mentioned(hooks, copy, original) and not _are_connected(graph, copy, original)
        for _, name in names_of(part)
    ]
    return tied(graph, groups) if groups else graph


def _names_in_hooks(module: nn.Module) -> list[frozenset[str]]:
    callbacks: Sequence[object] = getattr(trainer_of(module), "callbacks", ())
    return names_in_hooks([module, *callbacks], [*module.modules()])


def _mentions(names: Set[str], path: str, other: str) -> bool:
    """True if one of the names, or patterns of names, is in the path only."""
    return any(fnmatchcase(part, name) for part in _distinct(path, other) for name in names)


def _distinct(path: str, other: str) -> set[str]:
    """The names in a path that are not in the other one, or all if there are none."""
    names = {name for name in path.split(".") if not name.isdigit()}
    return names - {*other.split(".")} or names


def _are_connected(graph: OperatorGraph, one: str, other: str) -> bool:
    """True if operators with parameters or buffers of one module follow from operators with those of the other."""
    first, second = (
        {each.name for each in graph if any(name.startswith(f"{path}.") for name in (*each.parameters, *each.buffers))}
        for path in (one, other)
    )
    return any(
        to & {name for layer in nx.bfs_layers(graph.nx, start) for name in layer}
        for start, to in ((first, second), (second, first))
    )


def _pairs(module: nn.Module, used: Set[str], trained: Set[str]) -> Iterator[tuple[NamedPart, NamedPart]]:
    """The largest copies, which have none of the used tensors, each with its original, which has some.

    A copy is of the same class and has tensors of the same names and shapes. Where several modules are alike, those
    that are trained are the originals, and copies belong to them in order, if there are as many, or a multiple.
    """
    names = {id(tensor): name for tensor, name in names_of(module)}
    known, copies = defaultdict[Hashable, list[NamedPart]](list), defaultdict[Hashable, list[NamedPart]](list)
    held = {path: {names[id(tensor)] for tensor, _ in names_of(part)} for path, part in module.named_modules()}
    candidates = [(path, part) for path, part in module.named_modules() if held[path] and not held[path] & used]
    kinds = {type(part) for _, part in candidates}
    for path, part in module.named_modules():
        if held[path] & used and type(part) in kinds:
            known[_form(part)].append((path, part))
    for path, part in candidates:
        inside = any(path.startswith(f"{around}.") for found in copies.values() for around, _ in found)
        if not inside and _form(part) in known:
            copies[_form(part)].append((path, part))
    for form, found in copies.items():
        updated = [part for part in known[form] if held[part[0]] & trained] or known[form]
        if len(found) % len(updated) == 0:
            yield from zip(found, cycle(updated), strict=False)


def _form(part: nn.Module) -> Hashable:
    return type(part), tuple((name, tensor.shape, tensor.dtype) for tensor, name in names_of(part))
