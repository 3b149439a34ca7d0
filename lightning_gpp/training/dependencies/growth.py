"""Parameters that a module gets after its stages were made."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from lightning_gpp.errors import ConfigError
from lightning_gpp.wording import some


def check_grown(module: nn.Module, placed: Collection[str], given: Iterable[str]) -> None:
    """Check that no stage lacks a parameter.

    Copies of modules that hooks make, and that training does not call, need no stage.

    Args:
        module: the user's module.
        placed: names of the parameters that had a place when stages were made.
        given: names of the parameters that optimizers have.

    Raises:
        ConfigError: a module of a stage has got a parameter, or an optimizer has one that has no place.
    """
    inside = {path for name in placed for path in _paths_around(name)}
    new = [name for name, _ in module.named_parameters() if name not in placed]
    lacking = {name: None for name in new if not inside.isdisjoint(_paths_around(name))}
    lacking.update(dict.fromkeys(sorted(name for name in given if name not in placed)))
    if lacking:
        raise ConfigError(
            f"After training had begun, {type(module).__name__} got parameters that no stage has: "
            f"{some(list(lacking))}. Stages are made once, of the layers that exist then. Make all layers in "
            "__init__ or configure_model; let a flag decide in the forward whether one is called, and freeze it "
            "(requires_grad_(False)) until then. Or end trainer.fit, add the layers, and call it again."
        )


def _paths_around(name: str) -> list[str]:
    """The paths of the modules around a parameter, without the module itself."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
