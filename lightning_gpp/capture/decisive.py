"""Numbers and texts of the step on which its network depends: a temperature between two module calls, an argument.

The step runs as Python in training, so it always sees their present values, but what it computes between its module
calls, and Python values that it passes to modules, run in stages as they were captured. These attributes are found by
recordings with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture.attributes import Attribute, AttributePlace, is_plain
from lightning_gpp.capture.network import Network
from lightning_gpp.errors import CaptureError, ShapeError

_MOST: Final = 32
"""Values that are tried; a step that reads more reads a configuration of everything."""

Try = Callable[[Mapping[Attribute, Any]], Network]
"""Records the step with other values of attributes."""


def decisive(network: Network, attempt: Try) -> dict[Attribute, Any]:
    """The attributes on which a step's network depends, with their values.

    Args:
        network: the step's network with the present values.
        attempt: records it with others.
    """
    values = dict(_tried(network.recording.attributes.get(-1, {})))
    others = {key: _other(value) for key, value in values.items()}
    if not 0 < len(others) <= _MOST or _is_same(network, attempt, others):
        return {}
    found = {key: values[key] for key, other in others.items() if not _is_same(network, attempt, {key: other})}
    return found or values


def set_values(module: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes of a copy of the module other values."""
    for key, value in values.items():
        AttributePlace(module, key).write(value)


def _tried(read: Mapping[Attribute, Any]) -> Iterator[tuple[Attribute, Any]]:
    """The numbers and texts among attributes, and in dictionaries of them such as hyperparameters."""
    for (path, name), value in read.items():
        if _is_tried(value):
            yield (path, name), value
        elif isinstance(value, dict) and is_plain(value):
            for key, inner in value.items():
                if _is_tried(inner) and isinstance(key, str) and "." not in key:
                    yield (path, f"{name}.{key}"), inner


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
