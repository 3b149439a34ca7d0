"""Graph pipeline parallelism for PyTorch Lightning: trains an unmodified, branching LightningModule in stages.

The names below are the public interface, documented in `docs/reference/python.md`; everything else is internal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from lightning_gpp import _registration
from lightning_gpp.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    ForeignTensorError,
    GPPError,
    PeerFailure,
    PlanError,
    ScheduleError,
)

if TYPE_CHECKING:
    from lightning_gpp import sequence
    from lightning_gpp.capture import Capture, capture_step
    from lightning_gpp.checkpoints.pretrained import load_pretrained, parameters_on_meta
    from lightning_gpp.cluster import Cluster, Device, Link, Node, load_cluster, preset_cluster
    from lightning_gpp.fabric import GPPFabricStrategy
    from lightning_gpp.graph import Affine, OperatorGraph
    from lightning_gpp.plan import SOURCE, STEP, Edge, Figures, Plan, Stage
    from lightning_gpp.planning import (
        Answer,
        Draft,
        DraftStage,
        Evaluator,
        Prediction,
        Problem,
        Request,
        SearchControl,
        best_plan,
        estimate,
        register_partitioner,
    )
    from lightning_gpp.schedules import Action, Kind, Schedule, compile_program, register_schedule
    from lightning_gpp.simulation import StageCosts, Timeline, simulate, trace_of
    from lightning_gpp.strategy import FillBubbles, GPPStrategy, ValidateInBubbles
    from lightning_gpp.training.engine import Engine
    from lightning_gpp.training.loop import initialize
    from lightning_gpp.training.options import Options
    from lightning_gpp.training.tensors.gathered import summon_full_params

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Affine",
    "Answer",
    "Capture",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "Device",
    "Draft",
    "DraftStage",
    "Edge",
    "Engine",
    "Evaluator",
    "Figures",
    "FillBubbles",
    "ForeignTensorError",
    "GPPError",
    "GPPFabricStrategy",
    "GPPStrategy",
    "Kind",
    "Link",
    "Node",
    "OperatorGraph",
    "Options",
    "PeerFailure",
    "Plan",
    "PlanError",
    "Prediction",
    "Problem",
    "Request",
    "SOURCE",
    "STEP",
    "Schedule",
    "ScheduleError",
    "SearchControl",
    "Stage",
    "StageCosts",
    "Timeline",
    "ValidateInBubbles",
    "__version__",
    "best_plan",
    "capture_step",
    "compile_program",
    "estimate",
    "initialize",
    "load_cluster",
    "load_pretrained",
    "parameters_on_meta",
    "preset_cluster",
    "register_partitioner",
    "register_schedule",
    "sequence",
    "simulate",
    "summon_full_params",
    "trace_of",
]

_ORIGINS: Final = {
    "capture": ("Capture", "capture_step"),
    "checkpoints.pretrained": ("load_pretrained", "parameters_on_meta"),
    "cluster": ("Cluster", "Device", "Link", "Node", "load_cluster", "preset_cluster"),
    "fabric": ("GPPFabricStrategy",),
    "graph": ("Affine", "OperatorGraph"),
    "plan": ("SOURCE", "STEP", "Edge", "Figures", "Plan", "Stage"),
    "planning": (
        *("Answer", "Draft", "DraftStage", "Evaluator", "Prediction", "Problem", "Request", "SearchControl"),
        *("best_plan", "estimate", "register_partitioner"),
    ),
    "schedules": ("Action", "Kind", "Schedule", "compile_program", "register_schedule"),
    "simulation": ("StageCosts", "Timeline", "simulate", "trace_of"),
    "strategy": ("FillBubbles", "GPPStrategy", "ValidateInBubbles"),
    "training.engine": ("Engine",),
    "training.tensors.gathered": ("summon_full_params",),
    "training.loop": ("initialize",),
    "training.options": ("Options",),
}
"""Public names by module, which their first use loads: planning without torch, all but the strategy without Lightning.
"""

_MODULES: Final = {name: module for module, names in _ORIGINS.items() for name in names}

_registration.register()


def __getattr__(name: str) -> Any:
    if name == "sequence":
        return importlib.import_module("lightning_gpp.sequence")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lightning_gpp.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
