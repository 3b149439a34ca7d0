"""Private attributes of a LightningModule, for code that knows modules without importing Lightning."""

from __future__ import annotations

from typing import Any


def trainer_of(module: Any) -> Any:
    """The trainer of a LightningModule, None if it has none; `module.trainer` raises then."""
    return getattr(module, "_trainer", None)


def set_trainer(module: Any, trainer: Any) -> None:
    """Attach anything that stands in for a trainer; the public setter accepts trainers only."""
    vars(module)["_trainer"] = trainer


def set_device_mesh(module: Any, mesh: object) -> None:
    """Set the mesh that a LightningModule's `device_mesh` returns."""
    module._device_mesh = mesh
