"""Side effects of a run of the step that does not count, undone afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import MOST_ITEMS, OF_EVERY_MODULE
from lightning_gpp.capture.isolate import tensor_named
from lightning_gpp.capture.kept import CHANGING, Holder, Kept, unchanged, unmoved


def modules_of_step(module: nn.Module, called: Collection[str], touched: Collection[str] = ()) -> list[nn.Module]:
    """The modules whose forwards are the step's own: all that are not among or inside of the `called` ones.

    Metrics are left out, whose states change in place, and torch's own classes, whose forwards keep nothing.

    Args:
        module: the root.
        called: paths of the modules that the step calls.
        touched: paths of modules of which the step may set attributes, wherever they are.
    """
    inside = tuple(f"{path}." if path else "" for path in called)

    def counts(path: str, part: nn.Module) -> bool:
        own = not (f"{path}.".startswith(inside) or type(part).__module__.partition(".")[0] == "torch")
        return (own or path in touched) and not isinstance(part, Metric)

    return [module, *(part for path, part in module.named_modules() if path and counts(path, part))]


def _containers(attributes: dict[str, Any]) -> Iterator[Holder]:
    for name, value in attributes.items():
        if type(value) in CHANGING and name not in OF_EVERY_MODULE:
            yield value


@contextmanager
def without_effects(modules: Sequence[nn.Module], changed: Collection[str], inside: Kept) -> Iterator[None]:
    """Restore what modules keep when the context ends: attributes, buffers, random generators, and containers and plain
    objects in them.

    Of containers with many items only lists that grew are restored.

    Args:
        modules: their attributes are restored. The first is the root.
        changed: names of parameters and buffers of the root that change in place.
        inside: what their attributes keep; it is looked for once per mini-batch.
    """
    states = [tensor_named(modules[0], name) for name in changed]
    values = [(tensor, tensor.detach().clone()) for tensor in states]
    before = [(module, dict(vars(module)), buffers_of(module).copy()) for module in modules]
    holders = {id(each): each for each in inside.holders}
    holders |= {id(value): value for _, own, _ in before for value in _containers(own)}
    try:
        with unchanged(list(holders.values()), most=MOST_ITEMS), unmoved(inside.generators):
            yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            buffers_of(module).update(buffers)
        for tensor, value in values:
            tensor.data.copy_(value)  # a graph that has saved the tensor finds it unchanged
