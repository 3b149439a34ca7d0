"""Partitioners by name. A partitioner is a function from a planning problem to a draft of the best plan it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning.problem.answer import Answer, Control
from lightning_gpp.planning.problem.problem import Problem

Partitioner = Callable[[Problem, Control], Answer]

_PARTITIONERS: Final[dict[str, Partitioner]] = {}


def register_partitioner(name: str) -> Callable[[Partitioner], Partitioner]:
    """Make a partitioner available as `strategy.partitioner=name`.

    Raises:
        ConfigError: the name is taken.
    """

    def add(partitioner: Partitioner) -> Partitioner:
        if name in _PARTITIONERS:
            raise ConfigError(f"A partitioner named {name!r} is registered already; choose another name.")
        _PARTITIONERS[name] = partitioner
        return partitioner

    return add


def partitioner_names() -> tuple[str, ...]:
    """All names that `strategy.partitioner` accepts."""
    return tuple(sorted(_PARTITIONERS))


def partitioner_of(name: str) -> Partitioner:
    """The partitioner registered under a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _PARTITIONERS:
        raise ConfigError(
            f"strategy.partitioner={name!r} does not exist. Choose one of: {', '.join(partitioner_names())}; or add "
            "your own with @lightning_gpp.register_partitioner(...) before the trainer starts."
        )
    return _PARTITIONERS[name]
