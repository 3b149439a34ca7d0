"""Weight policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lightning_gpp.errors import ConfigError
from lightning_gpp.runtime.weights.interface import Counting, Weights

Policy = TypeVar("Policy", bound=type[Counting])

_POLICIES: Final[dict[str, type[Counting]]] = {}


def register(name: str) -> Callable[[Policy], Policy]:
    """Make a policy available as `strategy.weights=name`; its keyword-only arguments are its options.

    Raises:
        ConfigError: the name is taken.
    """

    def add(policy: Policy) -> Policy:
        if name in _POLICIES:
            raise ConfigError(f"A weight policy named {name!r} is registered already; choose another name.")
        _POLICIES[name] = policy
        return policy

    return add


def weight_policy_names() -> tuple[str, ...]:
    """All names that `strategy.weights` accepts besides "synchronous"."""
    return tuple(sorted(_POLICIES))


def make_policy(name: str, weights: Weights, **options: Any) -> Counting:
    """The policy registered under a name, for the weights of one device.

    Raises:
        ConfigError: there is none, or it has no such option.
    """
    check_options(name, options)
    return _POLICIES[name](weights, **options)


def copies_of(name: str, delay: int) -> int:
    """Copies of a stage's weights that a policy keeps besides the newest, if the stage has this delay."""
    return _POLICIES[name].copies(delay)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ConfigError if there is no policy of this name, or it has no such options."""
    if name not in _POLICIES:
        raise ConfigError(
            f"strategy.weights={name!r} is not a weight policy. Choose one of: synchronous, "
            f"{', '.join(weight_policy_names())}; or add your own with @lightning_gpp.runtime.weights.register(...)."
        )
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"strategy.weight_options has {unknown}; strategy.weights={name} knows {sorted(known) or 'no options'}."
        )


def options_of(name: str) -> dict[str, Any]:
    """The options of a policy, and their defaults."""
    parameters = inspect.signature(_POLICIES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
