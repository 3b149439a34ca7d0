"""Private names of a LightningModule and its trainer, for code that knows them without importing Lightning."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

LIGHTNING_STATE: Final = frozenset(
    f"_{name}"
    for name in (
        *("trainer", "fabric", "fabric_optimizers", "device", "dtype", "device_mesh", "compiler_ctx"),
        *("automatic_optimization", "strict_loading", "example_input_array", "current_fx_name", "metric_attributes"),
        *("param_requires_grad_state", "log_hyperparams", "hparams_initial", "hparams_name"),
    )
)
"""Attributes in which Lightning keeps its own state of a module; `_hparams` has the user's values."""


def trainer_of(module: Any) -> Any:
    """The trainer of a LightningModule, None if it has none; `module.trainer` raises then."""
    if not _is_lightning(module) or module.fabric is not None:
        return None
    with suppress(RuntimeError):
        return module.trainer


def set_trainer(module: Any, trainer: Any) -> None:
    """Attach anything that stands in for a trainer, without a trace for who observes the module."""
    vars(module)["_trainer"] = trainer


def set_device(module: Any, device: object) -> None:
    """Set the device that `self.device` returns, in all LightningModules of a module tree.

    Only `module.to(device)` sets it, which a module whose parameters are placed one by one is never asked for.
    """
    for part in module.modules():
        if _is_lightning(part):
            part._device = device


def _is_lightning(module: Any) -> bool:
    return "LightningModule" in {kind.__name__ for kind in type(module).__mro__}


def set_device_mesh(module: Any, mesh: object) -> None:
    """Set the mesh that a LightningModule's `device_mesh` returns."""
    module._device_mesh = mesh
