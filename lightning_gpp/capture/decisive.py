"""Numbers of the step on which its network depends: a temperature between two module calls, an argument.

The step runs as Python in training, so it always sees their present values, but what it computes between its module
calls, and Python values that it passes to modules, run in stages as they were captured. These attributes are found by
recordings with other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import (
    Attribute,
    AttributePlace,
    dotted,
    has_settings,
    is_plain,
    settings,
)
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError, ShapeError

_MOST: Final = 32
"""Values of an object that are tried; one with more is a configuration of everything."""

Try = Callable[[Mapping[Attribute, Any]], Network]
"""Records the step with other values of attributes."""


def decisive(module: nn.Module, network: Network, attempt: Try) -> dict[Attribute, Any]:
    """The attributes on which a step's network depends, with their values.

    Flags and texts in objects and dictionaries count anyway, because it is not known what other values of them do.

    Args:
        module: the user's module.
        network: the step's network with the present values.
        attempt: records it with others.

    Raises:
        CaptureError: the step itself changes one of the numbers, and would do so once per micro-batch.
    """
    recording = network.recording
    inside = _inside(module, recording.attributes.get(-1, {}))
    own = [key for key, value in recording.attributes.get(-1, {}).items() if _is_number(value)]
    changed = {key: line for key in (*own, *inside) if (line := _changing_line(key, recording.set_by_step))}
    values = {key: AttributePlace(module, key).read() for key in (*own, *inside)}
    found = _found({key: value for key, value in values.items() if _is_number(value)}, changed, network, attempt)
    for attribute in sorted(found & changed.keys()):
        raise refusal(
            changed[attribute],
            f"the step changes {dotted(attribute)!r}, on which depends what its modules get, and would do so once per "
            "micro-batch",
            "change it in a hook such as on_train_batch_end",
        )
    kept = {key for key in inside if not _is_number(values[key]) and key not in changed}
    return {key: value for key, value in values.items() if key in found | kept}


def around(module: nn.Module, attributes: Iterable[Attribute]) -> dict[Attribute, Any]:
    """The objects that attributes are in: where one is replaced, they are others."""
    names = ((path, name.split(".")[:-1]) for path, name in attributes)
    places = {(path, ".".join(outer[: end + 1])) for path, outer in names for end in range(len(outer))}
    return {key: AttributePlace(module, key).read() for key in sorted(places)}


def _found(
    numbers: Mapping[Attribute, Any], changed: Collection[Attribute], network: Network, attempt: Try
) -> set[Attribute]:
    """The numbers that count. Those in objects that the step never changes are told apart as little as needed."""

    def counts(keys: Sequence[Attribute]) -> bool:
        return bool(keys) and not _is_same(network, attempt, {key: _other(numbers[key]) for key in keys})

    def search(keys: Sequence[Attribute]) -> list[Attribute]:
        """Those of the numbers that count; all, if they count together only."""
        if not counts(keys):
            return []
        middle = len(keys) // 2
        return [*keys] if not middle else [*search(keys[:middle]), *search(keys[middle:])] or [*keys]

    if not counts([*numbers]):
        return set()
    settled = [key for key in numbers if "." in key[1] and key not in changed]
    rest = [key for key in numbers if key not in settled]
    return {*search(rest), *(settled if counts(settled) else ())} or {*numbers}


def _changing_line(attribute: Attribute, changes: Mapping[Attribute, str]) -> str:
    """The line at which the step changes an attribute, or what is in it; empty if it does not."""
    path, name = attribute
    return next(
        (line for (where, what), line in changes.items() if where == path and f"{name}.".startswith(f"{what}.")), ""
    )


@contextmanager
def restored(places: Sequence[AttributePlace]) -> Iterator[None]:
    """Give these places their values again afterwards."""
    before = [place.read() for place in places]
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            if place.read() is not value:
                _write(place, value)


def set_values(copy: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes of a copy of the module other values."""
    for key, value in values.items():
        _write(AttributePlace(copy, key), value)


def _write(place: AttributePlace, value: Any) -> None:
    with suppress(Exception):  # what users' objects raise for values that they refuse, or never change
        place.write(value)


def _inside(module: nn.Module, read: Iterable[Attribute]) -> list[Attribute]:
    """Places of numbers, flags and texts in objects and dictionaries that the step reads, if they are few in each."""
    found: list[Attribute] = []
    for path, name in read:
        contents = _contents(AttributePlace(module, (path, name)).read())
        plain = [(path, f"{name}.{inner}") for inner, value in contents if isinstance(value, bool | int | float | str)]
        found += plain if len(plain) <= _MOST else []
    return found


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and is_plain(value):
        yield from ((key, inner) for key, inner in value.items() if isinstance(key, str) and "." not in key)
    elif has_settings(value):
        yield from ((name.partition(".")[2], inner) for name, inner in settings("", value).items() if name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _other(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return value + 0.125 * (1 + abs(value)) if math.isfinite(value) else 1.0


def _is_same(network: Network, attempt: Try, values: Mapping[Attribute, Any]) -> bool:
    """True if the step calls the same, with the same Python values, when attributes have other values."""
    try:
        return _calls(attempt(values)) == _calls(network)
    except (CaptureError, ShapeError):
        return False


def _calls(network: Network) -> list[Any]:
    """The calls of the step up to its last one of a module, with Python values and shapes."""
    own = [call for call in network.calls if call.scope == -1]
    return [
        network.inputs,
        network.step_targets,
        [(call.path, _plain((call.args, call.kwargs))) for call in network.network_calls()],
        [(call.target, call.outputs, _plain((call.args, call.kwargs))) for call in own],
    ]


def _plain(tree: Any) -> list[Any]:
    leaves = pytree.tree_leaves(tree)
    return [leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf) for leaf in leaves]
