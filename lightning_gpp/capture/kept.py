"""Finds what objects keep between calls: containers, attributes of plain objects, random generators, and metrics.

A copy of a module has its own, and a run that does not count leaves them as they are. What is outside of the module
(global variables, classes, closures, the trainer) is neither copied nor restored.
"""

from __future__ import annotations

import functools
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import is_
from typing import Any, Final, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_gpp._compat.lightning_module import trainer_of
from lightning_gpp._compat.torch import buffers_of
from lightning_gpp.capture.attributes import MOST_ITEMS, NAMESPACES, OF_EVERY_MODULE, is_users
from lightning_gpp.user_code import own_attributes

Holder = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
"""A container, or the attributes of an object."""
RandomSource = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A random generator of the user's own."""

_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
"""Types of containers, without classes that derive from them, whose methods may do anything."""
CHANGING: Final = frozenset({*_DICTS, *_SEQUENCES} - {tuple, frozenset})
"""Those whose contents may change."""
_NO_HOLDERS: Final = (
    nn.Parameter,
    type,
    types.ModuleType,
    types.FunctionType,
    str,
    bytes,
    int,
    float,
    type(None),
)
_DEEPEST: Final = 4
_DEEPEST_IN_LIBRARIES: Final = 12
_MOST_SEEN: Final = 10_000
"""Objects that are looked into."""
_TELLING: Final = (
    *("__getattr__", "__getattribute__", "__del__", "__slots__", "__new__"),
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
)
"""Methods of classes that say how their objects are made, read, copied or deleted."""
_ABSTRACT: Final = ("abc", "typing")
"""Modules with bases of classes that change nothing about their objects."""


def is_plain_object(value: Any) -> bool:
    """True for a namespace, and for an object of a class of the user's that derives from no class of a library and says
    nothing about how its objects are made, read, copied or deleted.
    """
    kind = type(value)
    if kind not in _PLAIN_KINDS:
        _PLAIN_KINDS[kind] = _is_plain_kind(kind)
    return _PLAIN_KINDS[kind]


_PLAIN_KINDS: Final = WeakKeyDictionary[type, bool]()


def _is_plain_kind(kind: type) -> bool:
    own = [base for base in kind.__mro__[:-1] if base.__module__ not in _ABSTRACT]
    says = any(name in vars(base) for base in own for name in _TELLING)
    return kind in NAMESPACES or (bool(own) and not says and all(is_users(base.__module__) for base in own))


class Kept:
    """Finds what objects keep.

    Args:
        values: the objects, such as a loader, or the attributes of a module, with their places.
        libraries: whether objects of libraries are looked into, too.
        apart: classes of objects that are not looked into.

    Attributes:
        holders: the containers, and the attributes of objects.
        generators: the random generators.
        tensors: tensors besides parameters.
        modules: modules, which are not looked into, by their places.
    """

    def __init__(
        self, values: Iterable[tuple[str, Any]], *, libraries: bool = False, apart: tuple[type, ...] = ()
    ) -> None:
        self.holders: list[Holder] = []
        self.generators: list[RandomSource] = []
        self.tensors: list[Tensor] = []
        self.modules: dict[str, nn.Module] = {}
        self._libraries, self._apart = libraries, (*_NO_HOLDERS, *apart)
        self._deepest = _DEEPEST_IN_LIBRARIES if libraries else _DEEPEST
        self._seen: dict[int, Any] = {}
        self._look_at(values, 1)

    def _look_at(self, values: Iterable[tuple[str, Any]], depth: int) -> None:
        for place, value in list(values):
            if isinstance(value, self._apart) or id(value) in self._seen or len(self._seen) > _MOST_SEEN:
                continue
            self._seen[id(value)] = value
            if isinstance(value, RandomSource):
                self.generators.append(value)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, nn.Module):
                self.modules[place] = value
            elif depth <= self._deepest:
                self._look_at(self._inside(place, value), depth + 1)

    def _inside(self, place: str, value: Any) -> Iterable[tuple[str, Any]]:
        """The contents of a value, which is noted if it is a holder."""
        kind = type(value)
        if kind in _DICTS or kind in _SEQUENCES:
            if kind in CHANGING:
                self.holders.append(value)
            items = islice(value.items() if kind in _DICTS else enumerate(value), MOST_ITEMS)
            return [(f"{place}[{key!r}]", item) for key, item in items]
        if isinstance(value, types.MethodType):
            return [(place, value.__self__)]
        if isinstance(value, functools.partial):
            return [(place, each) for each in (value.func, *value.args, *value.keywords.values())]
        attributes = own_attributes(value) if self._libraries or is_plain_object(value) else None
        if attributes is None:
            return []
        self.holders.append(attributes)
        return [(f"{place}.{name}", item) for name, item in islice(attributes.items(), MOST_ITEMS)]


def kept_by(modules: Iterable[nn.Module]) -> Kept:
    """Find what the attributes of modules keep."""
    return Kept(each for part in modules for each in _attributes(part))


def _attributes(owner: object, path: str = "") -> Iterator[tuple[str, Any]]:
    return ((f"{path}.{name}", value) for name, value in vars(owner).items() if name not in OF_EVERY_MODULE)


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


def metrics_in(owner: object, path: str) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """The metrics in attributes of an object at a path; not those that are parts of a module."""
    for place, module in Kept(_attributes(owner, path)).modules.items():
        if _is_metric(module):
            yield from ((inner, part) for inner, part in module.named_modules(prefix=place) if _is_metric(part))


def _is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    """True as by isinstance, which asks all kinds of metrics for each class, and an observed module has its own."""
    return not {Metric, MetricCollection}.isdisjoint(type(value).__mro__)


def silenced(copied: nn.Module, module: nn.Module) -> nn.Module:
    """The copy of a module, which logs and prints nothing from now on, and whose own metrics, which may be on one rank
    alone, synchronise with no other; some are the module's.
    """
    for part in (part for part in copied.modules() if hasattr(part, "log_dict")):
        vars(part).update(log=_ignore, log_dict=_ignore, print=_ignore)
        part.trainer = trainer_of(module)
    shared = set(map(id, metrics_of(module).values()))
    for metric in metrics_of(copied).values():
        if isinstance(metric, Metric) and id(metric) not in shared:
            metric.distributed_available_fn = bool  # returns False: there is nobody to synchronise with
    return copied


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces logging in a copy."""


@contextmanager
def without_effects(modules: Sequence[nn.Module], changed: Sequence[Tensor], inside: Kept) -> Iterator[None]:
    """Restore what modules keep when the context ends: attributes, buffers, random generators, and containers and plain
    objects in them.

    Of containers with many items only lists that grew are restored.

    Args:
        modules: their attributes are restored.
        changed: parameters and buffers that change in place.
        inside: what their attributes keep; it is looked for once per mini-batch.
    """
    values = [(tensor, tensor.detach().clone()) for tensor in changed]
    before = [(vars(module), dict(vars(module))) for module in modules]
    before += [(buffers, buffers.copy()) for buffers in map(buffers_of, modules)]
    holders = {id(each): each for each in inside.holders}
    holders |= {id(value): value for module in modules for _, value in _attributes(module) if type(value) in CHANGING}
    try:
        with unchanged(list(holders.values()), most=MOST_ITEMS), unmoved(inside.generators):
            yield
    finally:
        for table, entries in before:
            for name in table.keys() - entries.keys():
                del table[name]
            table.update(entries)
        for tensor, value in values:
            tensor.data.copy_(value)  # a graph that has saved the tensor finds it unchanged


def groups_of_optimizers(module: nn.Module) -> list[Holder]:
    """The groups of the user's optimizers, in which a step may set learning rates wherever it runs."""
    return [group for each in getattr(trainer_of(module), "optimizers", ()) for group in each.param_groups]


@contextmanager
def unchanged(holders: Sequence[Holder], most: int = 1 << 14) -> Iterator[None]:
    """Restore containers and attributes afterwards; lists of more than `most` items are only shortened again."""
    before = [(holder, _copied(holder)) for holder in holders if len(holder) <= most]
    long = [(holder, len(holder)) for holder in holders if len(holder) > most and isinstance(holder, list)]
    try:
        yield
    finally:
        for holder, known in before:
            if _differs(holder, known):
                holder.clear()
                holder.extend(known) if isinstance(holder, list | deque) else holder.update(known)
        for items, length in long:
            del items[length:]


def _copied(holder: Holder) -> Any:
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _differs(holder: Holder, known: Any) -> bool:
    now = _copied(holder)
    if isinstance(now, dict):
        return list(now) != list(known) or not all(map(is_, now.values(), known.values()))
    return len(now) != len(known) or not all(map(is_, now, known))


@contextmanager
def unmoved(generators: Sequence[RandomSource]) -> Iterator[None]:
    """Restore generators afterwards."""
    restores = list(map(_restoring, generators))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _restoring(generator: RandomSource) -> Callable[[], object]:
    """A function that gives a generator its present state again."""
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())  # type: ignore[arg-type]
