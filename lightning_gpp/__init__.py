"""Graph pipeline parallelism for PyTorch Lightning: trains an unmodified, branching LightningModule in stages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_gpp import _registration
from lightning_gpp.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    GPPError,
    PeerFailure,
    PlanError,
    ScheduleError,
    SelfCheckError,
    ShapeError,
    VerificationError,
)

if TYPE_CHECKING:
    from lightning_gpp.capture import Capture
    from lightning_gpp.plan import Edge, Plan, Stage
    from lightning_gpp.strategy import GPPStrategy

__version__ = "0.1.0"

__all__ = [
    "Capture",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "Edge",
    "GPPError",
    "GPPStrategy",
    "PeerFailure",
    "Plan",
    "PlanError",
    "ScheduleError",
    "SelfCheckError",
    "ShapeError",
    "Stage",
    "VerificationError",
    "__version__",
]

_LAZY = {
    "GPPStrategy": "lightning_gpp.strategy",
    "Capture": "lightning_gpp.capture",
    "Edge": "lightning_gpp.plan",
    "Plan": "lightning_gpp.plan",
    "Stage": "lightning_gpp.plan",
}
"""Loaded at first use, so that planning does not load torch, nor the runtime Lightning."""

_registration.register()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
