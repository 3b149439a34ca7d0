"""Weight policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from lightning_gpp.errors import ConfigError
from lightning_gpp.registry import Registry
from lightning_gpp.runtime.weights.interface import WeightPolicy, Weights

Policy = TypeVar("Policy", bound=type[WeightPolicy])

WEIGHT_POLICIES: Final[Registry[type[WeightPolicy]]] = Registry(
    setting="strategy.weights",
    kind="weight policy",
    decorator="runtime.weights.register_weights",
    error=ConfigError,
    built_in=("synchronous",),
)


def register_weights(name: str) -> Callable[[Policy], Policy]:
    """Make a policy available as `strategy.weights=name`; its keyword-only arguments are its options.

    Raises:
        ConfigError: the name is taken.
    """

    def entry(policy: Policy) -> type[WeightPolicy]:
        return policy

    return WEIGHT_POLICIES.adding(name, entry)


def weight_policy_names() -> tuple[str, ...]:
    """All names that `strategy.weights` accepts besides "synchronous"."""
    return WEIGHT_POLICIES.names()


def make_policy(name: str, weights: Weights, **options: Any) -> WeightPolicy:
    """The policy registered under a name, for the weights of one device.

    Raises:
        ConfigError: there is none, or it has no such option.
    """
    check_options(name, options)
    return WEIGHT_POLICIES.get(name)(weights, **options)


def copies_of(name: str, delay: int) -> int:
    """Copies of a stage's weights that a policy keeps besides the newest, if the stage has this delay.

    Raises:
        ScheduleError: the policy does not allow it.
    """
    return WEIGHT_POLICIES.get(name).copies(delay)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ConfigError if there is no policy of this name, or it has no such options, or of other types."""
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"strategy.weight_options has {unknown}; strategy.weights={name} knows {sorted(known) or 'no options'}."
        )
    hints = get_type_hints(WEIGHT_POLICIES.get(name).__init__)
    for option, value in options.items():
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(
                f"strategy.weight_options.{option}={value!r}: {problem}. The default is {known[option]!r}."
            ) from None


def options_of(name: str) -> dict[str, Any]:
    """The options of a policy, and their defaults."""
    parameters = inspect.signature(WEIGHT_POLICIES.get(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
