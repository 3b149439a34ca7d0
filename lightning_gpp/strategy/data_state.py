"""Changes that reading a mini-batch makes in users' objects are undone: counters, positions, own random generators.

The first mini-batch is read at set-up, and once more by the loop. Samplers that count epochs, and data with generators
for augmentation, would be one ahead in all of training.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lightning_gpp.capture.attributes import OF_EVERY_MODULE

_MOST: Final = 10_000
"""Objects that are looked at."""
_LONGEST: Final = 1_000
"""Items of containers that are looked at, and restored."""
_CONTAINERS: Final = (list, dict, set, deque)
_OPAQUE: Final = (type, ModuleType, Tensor, np.ndarray, str, bytes, pl.Trainer)
"""Types of objects without a state of the user's inside."""

_Restore = Callable[[], None]


@contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Restore afterwards the attributes, small containers and random generators of these objects and inside of them."""
    restores = [restore for each in _reachable(roots) for restore in _restores(each)]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    waiting, seen = deque(roots), dict[int, Any]()
    while waiting and len(seen) < _MOST:
        each = waiting.popleft()
        if id(each) not in seen and not isinstance(each, _OPAQUE):
            seen[id(each)] = each  # lives on, so that no other object gets its id
            yield each
            waiting.extend(_inside(each))


def _inside(each: Any) -> Iterator[Any]:
    if isinstance(each, FunctionType):
        yield from _of_function(each)
    elif isinstance(each, MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, functools.partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif isinstance(each, dict | list | tuple | set | deque):
        if len(each) <= _LONGEST:
            yield from each.values() if isinstance(each, dict) else each
    else:
        yield from _attributes(each).values()
        yield from _of_class(type(each))


def _of_class(kind: type) -> Iterator[Any]:
    """Its methods, and the generators that all objects of a class share."""
    for part in kind.__mro__:
        yield from (each for each in vars(part).values() if isinstance(each, FunctionType) or _is_generator(each))


def _of_function(function: FunctionType) -> Iterator[Any]:
    """The contents of a closure, and the generators among the global variables that a function names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    known = function.__globals__
    yield from (known[name] for name in function.__code__.co_names if _is_generator(known.get(name)))


def _attributes(each: Any) -> dict[str, Any]:
    own: dict[str, Any] = getattr(each, "__dict__", {})
    return {name: value for name, value in own.items() if name not in OF_EVERY_MODULE}


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def _restores(each: Any) -> Iterator[_Restore]:
    if isinstance(each, torch.Generator):
        yield functools.partial(_set_state, each, each.get_state())
    elif isinstance(each, np.random.RandomState):
        yield functools.partial(each.set_state, each.get_state())
    elif isinstance(each, np.random.Generator):
        yield functools.partial(setattr, each.bit_generator, "state", each.bit_generator.state)
    elif isinstance(each, random.Random):
        yield functools.partial(each.setstate, each.getstate())
    elif isinstance(each, _CONTAINERS):
        if len(each) <= _LONGEST:
            yield functools.partial(_refill, each, each.copy())
    elif hasattr(each, "__dict__"):
        yield functools.partial(_put_back, each, _attributes(each))


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _refill(container: Any, before: Any) -> None:
    if _ids(container) != _ids(before):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _ids(container: Any) -> list[Any]:
    return (
        [(id(key), id(value)) for key, value in container.items()]
        if isinstance(container, dict)
        else [*map(id, container)]
    )


def _put_back(each: Any, before: dict[str, Any]) -> None:
    own = each.__dict__
    for name in _attributes(each).keys() - before.keys():
        del own[name]
    for name, value in before.items():
        if own.get(name) is not value:
            own[name] = value
