"""Numbers and texts of the step on which its network depends: a temperature between two module calls, an argument.

The step runs as Python in training, so it always sees their present values, but what it computes between its module
calls, and Python values that it passes to modules, run in stages as they were captured. These attributes are found by
recordings with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import Attribute, AttributePlace, dotted, has_settings, is_plain, settings
from lightning_gpp.capture.network import Network
from lightning_gpp.capture.recorder import refusal
from lightning_gpp.errors import CaptureError, ShapeError

_MOST: Final = 32
"""Values in objects that are tried; a step with more reads a configuration of everything."""

Try = Callable[[Mapping[Attribute, Any]], Network]
"""Records the step with other values of attributes."""


def decisive(network: Network, attempt: Try) -> dict[Attribute, Any]:
    """The attributes on which a step's network depends, with their values.

    Args:
        network: the step's network with the present values.
        attempt: records it with others.

    Raises:
        CaptureError: the step itself changes one of them, and would do so once per micro-batch.
    """
    found = _found(network, attempt)
    changed = network.recording.set_by_step
    for attribute in sorted(found.keys() & changed.keys()):
        raise refusal(
            changed[attribute],
            f"the step changes {dotted(attribute)!r}, on which depends what its modules get, and would do so once per "
            "micro-batch",
            "change it in a hook such as on_train_batch_end",
        )
    return found


def _found(network: Network, attempt: Try) -> dict[Attribute, Any]:
    values = _tried(network.recording.attributes.get(-1, {}))

    def search(keys: Sequence[Attribute]) -> list[Attribute]:
        """Those of the attributes that count; all, if they count together only."""
        if not keys or _is_same(network, attempt, {key: _other(values[key]) for key in keys}):
            return []
        if len(keys) == 1:
            return [*keys]
        middle = len(keys) // 2
        return [*search(keys[:middle]), *search(keys[middle:])] or [*keys]

    return {key: values[key] for key in search([*values])}


@contextmanager
def with_values(module: nn.Module, values: Mapping[Attribute, Any]) -> Iterator[None]:
    """Inside, objects that the module shares with its copies, and its dictionaries, have other values."""
    places = [(AttributePlace(module, key), value) for key, value in values.items() if "." in key[1]]
    before = [place.read() for place, _ in places]
    try:
        for place, value in places:
            _write(place, value)
        yield
    finally:
        for (place, _), value in zip(places, before, strict=True):
            _write(place, value)


def _write(place: AttributePlace, value: Any) -> None:
    with suppress(AttributeError):  # a frozen object keeps its values anyway
        place.write(value)


def set_values(copy: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes of a copy of the module other values."""
    for key, value in values.items():
        if "." not in key[1]:
            AttributePlace(copy, key).write(value)


def _tried(read: Mapping[Attribute, Any]) -> dict[Attribute, Any]:
    """The numbers and texts among attributes, and those in objects and dictionaries if there are few."""
    own = {key: value for key, value in read.items() if _is_tried(value)}
    inside = {
        (path, f"{name}.{inner}"): content
        for (path, name), value in read.items()
        for inner, content in _contents(value)
        if _is_tried(content)
    }
    return {**own, **inside} if len(inside) <= _MOST else own


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and is_plain(value):
        yield from ((key, inner) for key, inner in value.items() if isinstance(key, str) and "." not in key)
    elif has_settings(value):
        yield from ((name.partition(".")[2], inner) for name, inner in settings("", value).items())


def _is_tried(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}?"
    return value + 1 if isinstance(value, int) else 1.25 * value + 0.125


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
