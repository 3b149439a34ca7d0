"""Side effects of a run of the step that does not count, undone afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import OF_EVERY_MODULE, Attribute
from lightning_gpp.capture.isolate import tensor_named
from lightning_gpp.capture.places import CONTAINERS, contents_kept, places_kept


def modules_of_step(module: nn.Module, called: Collection[str]) -> list[nn.Module]:
    """The modules whose forwards are the step's own: all that are not among or inside of the `called` ones.

    Metrics are left out, whose states change in place, and torch's own classes, whose forwards keep nothing.
    """
    inside = tuple(f"{path}." if path else "" for path in called)
    parts = ((path, part) for path, part in module.named_modules() if path and not _is_librarys(part))
    return [module, *(part for path, part in parts if not f"{path}.".startswith(inside))]


def _is_librarys(part: nn.Module) -> bool:
    return isinstance(part, Metric) or type(part).__module__.partition(".")[0] == "torch"


def named_in_step(module: nn.Module, names: Set[str]) -> list[Attribute]:
    """The attributes of parts that the code of the step names, and may change."""
    parts = ((path, part) for path, part in module.named_modules() if path and not isinstance(part, Metric))
    return [(path, name) for path, part in parts for name in sorted(names & vars(part).keys() - OF_EVERY_MODULE)]


@contextmanager
def without_effects(
    modules: Sequence[nn.Module], changed: Collection[str] = (), inside: Collection[Attribute] = ()
) -> Iterator[None]:
    """Restore attributes, buffers, long lists that grew, and other containers of few items, when the context ends.

    Changes inside other objects stay.

    Args:
        modules: their attributes are restored. The first is the root.
        changed: names of parameters and buffers of the root that change in place.
        inside: attributes of other parts, of objects and outside of the module that change.
    """
    states = [tensor_named(modules[0], name) for name in changed]
    values = [(tensor, tensor.detach().clone()) for tensor in states]
    before = [(module, dict(vars(module)), buffers_of(module).copy()) for module in modules]
    containers = [value for module in modules for value in _containers(module)]
    try:
        with (
            places_kept(modules[0], inside) if inside else nullcontext(),
            contents_kept(containers) if containers else nullcontext(),
        ):
            yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            buffers_of(module).update(buffers)
        for tensor, value in values:
            tensor.data.copy_(value)  # a graph that has saved the tensor finds it unchanged


def _containers(module: nn.Module) -> list[Any]:
    own = (value for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    return [value for value in own if type(value) in CONTAINERS]
