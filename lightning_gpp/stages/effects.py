"""Side effects of a run of the step that does not count, undone afterwards."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import nn
from torchmetrics import Metric

from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import (
    OF_EVERY_MODULE,
    Attribute,
    AttributePlace,
    as_it_is,
    copy_of,
    is_plain,
    same_value,
)
from lightning_gpp.capture.isolate import tensor_named

_CONTAINERS: Final = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


def modules_of_step(module: nn.Module, called: Collection[str]) -> list[nn.Module]:
    """The modules that the step may change itself: all that are not inside of the `called` ones, which are answered.

    Metrics are left out, whose states change in place.
    """
    inside = tuple(f"{path}." if path else "" for path in called)
    parts = ((path, part) for path, part in module.named_modules() if path and not isinstance(part, Metric))
    return [module, *(part for path, part in parts if not path.startswith(inside))]


@contextmanager
def without_effects(
    modules: Sequence[nn.Module], changed: Collection[str] = (), inside: Collection[Attribute] = ()
) -> Iterator[None]:
    """Restore attributes, buffers, long lists that grew, and other containers of few items, when the context ends.

    Changes inside other objects stay.

    Args:
        modules: their attributes are restored. The first is the root.
        changed: names of parameters and buffers of the root that change in place.
        inside: attributes of other parts and of objects that change.
    """
    states = [tensor_named(modules[0], name) for name in changed]
    values = [(tensor, tensor.detach().clone()) for tensor in states]
    places = [AttributePlace(modules[0], key) for key in inside]
    objects = [(place, as_it_is(place.read())) for place in places]
    before = [(module, dict(vars(module)), buffers_of(module).copy(), _containers(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers, containers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            buffers_of(module).update(buffers)
            for items, kept in containers:
                _restore_items(items, kept)
        for place, kept in objects:
            if is_plain(kept) and not same_value(place.read(), kept):
                place.write(kept)
        for tensor, value in values:
            tensor.data.copy_(value)  # a graph that has saved the tensor finds it unchanged


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The containers in attributes, each with a copy; with the length for long lists, to which the step may append."""
    own = [value for name, value in vars(module).items() if name not in OF_EVERY_MODULE and type(value) in _CONTAINERS]
    kept = [(value, copy_of(value)) for value in own]
    return [(value, len(value) if copied is None else copied) for value, copied in kept]


def _restore_items(items: Any, kept: Any) -> None:
    if isinstance(items, list):
        items[:] = items[:kept] if isinstance(kept, int) else kept
    elif not isinstance(kept, int):
        items.clear()
        items.extend(kept) if isinstance(items, deque) else items.update(kept)
