"""The torchmetrics objects of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_gpp.capture.attributes import OF_EVERY_MODULE
from lightning_gpp.capture.kept import is_plain_object

_DEPTH: Final = 3


def metrics_of(module: nn.Module) -> dict[str, Metric | MetricCollection]:
    """The metrics of a module, each once: its parts by path, and those in containers and plain objects of attributes.

    torch does not know the latter: they have no device, and no place in a checkpoint.
    """
    found: dict[int, tuple[str, Metric | MetricCollection]] = {}
    for path, part in module.named_modules():
        own = ((path, part),) if _is_metric(part) else metrics_in(part, path)
        for place, metric in own:
            found.setdefault(id(metric), (place, metric))
    return dict(found.values())


def _is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    """True as by isinstance, which asks all kinds of metrics for each class, and an observed module has its own."""
    return not {Metric, MetricCollection}.isdisjoint(type(value).__mro__)


def metrics_in(owner: object, path: str) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """The metrics in attributes of an object at a path; not those that are parts of a module."""
    for name, value in vars(owner).items():
        if name not in OF_EVERY_MODULE:
            yield from _inside(f"{path}.{name}", value, _DEPTH)


def _inside(place: str, value: Any, depth: int) -> Iterator[tuple[str, Metric | MetricCollection]]:
    if _is_metric(value):
        for path, part in value.named_modules(prefix=place):
            if _is_metric(part):
                yield path, part
    elif isinstance(value, list | tuple | dict) and depth:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(f"{place}[{key!r}]", item, depth - 1)
    elif depth and is_plain_object(value):
        for name, item in vars(value).items():
            yield from _inside(f"{place}.{name}", item, depth - 1)


def keep_apart(copied: nn.Module, module: nn.Module) -> None:
    """Let a copy's own metrics, which may be on one rank alone, synchronise with no other. Some are the module's."""
    shared = set(map(id, metrics_of(module).values()))
    for metric in metrics_of(copied).values():
        if isinstance(metric, Metric) and id(metric) not in shared:
            metric.distributed_available_fn = bool  # returns False: there is nobody to synchronise with
