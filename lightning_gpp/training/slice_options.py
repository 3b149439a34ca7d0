"""What the settings say of slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpp.errors import ConfigError
from lightning_gpp.planning.assignment.slices import Slicing


def slicing_from(slices: Any, dim: Any, modules: Any) -> Slicing | None:
    """What `strategy.slices`, `slice_dim` and `slice_modules` ask for; None for micro-batches that stay whole.

    Raises:
        ConfigError: a value is wrong.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise ConfigError(
            f"strategy.slice_dim is {dim!r}; it must be a whole number >= 1: dimension 0 counts the samples."
        )
    if modules is not None and (isinstance(modules, str) or not all(isinstance(name, str) for name in modules)):
        raise ConfigError(f"strategy.slice_modules is {modules!r}; it must be a list of paths of modules, or null.")
    if slices is None:
        unused = [f"slice_dim={dim}"] * (dim != 1) + [f"slice_modules={modules}"] * (modules is not None)
        if unused:
            raise ConfigError(f"strategy.{unused[0]} is given without strategy.slices, which says into how many.")
        return None
    listed = isinstance(slices, Sequence) and not isinstance(slices, str)
    numbers = list(slices) if listed else [slices]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise ConfigError(
            f"strategy.slices is {slices!r}; it must be a whole number >= 1, or the tokens of each slice as a list."
        )
    if numbers == [1] or (listed and len(numbers) == 1):
        return None
    return Slicing(
        slices=tuple(numbers) if listed else slices, dim=dim, modules=None if modules is None else tuple(modules)
    )
