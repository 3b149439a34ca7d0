"""Partitioners by name. A partitioner is a function from a planning problem to a draft of the best plan it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.planning.problem.answer import Answer, SearchControl
from lightning_gpp.planning.problem.problem import Problem

Partitioner = Callable[[Problem, SearchControl], Answer]

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


def checked(name: str, problem: Problem, answer: object) -> Answer:
    """The answer of a partitioner, perhaps a user's own, checked.

    Raises:
        PlanError: it is no answer, or its draft leaves out or repeats units or devices.
    """
    if not isinstance(answer, Answer):
        raise PlanError(f"The partitioner {name!r} returned {type(answer).__name__}; it must return an Answer.")
    stages = answer.draft.stages if answer.draft else ()
    for what, found, number in (
        ("unit", [unit for stage in stages for unit in stage.units], problem.num_units),
        ("device", [device for stage in stages for device in stage.devices], problem.num_devices),
    ):
        if answer.draft and sorted(found) != list(range(number)):
            raise PlanError(
                f"The partitioner {name!r} returned a draft with {what}s {sorted(found)}; each {what} from 0 to "
                f"{number - 1} must be in one stage."
            )
    return answer
